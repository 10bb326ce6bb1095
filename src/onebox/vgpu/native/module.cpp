// What Python sees of the device: devices are opened, what a call means is learned, and what was recorded is taken.

#include "recorder.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/ApproximateClock.h>

#include <array>
#include <chrono>
#include <thread>

namespace py = pybind11;

namespace onebox {

namespace {

// never destroyed, as the interpreter may be gone by then
py::object& miss_function = *new py::object;
py::object& full_function = *new py::object;
py::object& due_function = *new py::object;
py::object& generators = *new py::object;
py::object& profiler = *new py::object;

// Calls Python while a mutex, which this thread holds, is another's to take.
template <typename Call>
auto unlocked(std::mutex& held, Call call) {
  struct Again {
    std::mutex& held;
    ~Again() {  // who has the mutex must not wait for Python's lock, as others wait for the mutex with that in hand
      while (!held.try_lock()) {
        if (!PyGILState_Check()) {
          held.lock();
          return;
        }
        const py::gil_scoped_release free;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  } again{held};
  held.unlock();
  const py::gil_scoped_acquire gil;
  return call();
}

py::object shared(Queue& queue) { return py::cast(queue.shared_from_this()); }

const GeneratorHandlers generator_handlers{
    [](Queue& queue) {
      const py::gil_scoped_acquire gil;
      return generators.attr("make")(shared(queue)).cast<int64_t>();
    },
    [](Queue& queue, int64_t number, uint64_t seed, std::mutex& held) {
      unlocked(held, [&] { generators.attr("seed")(shared(queue), number, seed); });
    },
    [](Queue& queue, int64_t number, std::mutex& held) {
      return unlocked(held, [&] { return generators.attr("state")(shared(queue), number).cast<at::Tensor>(); });
    },
    [](Queue& queue, int64_t number, const at::Tensor& state, std::mutex& held) {
      unlocked(held, [&] { generators.attr("set_state")(shared(queue), number, state); });
    }};

const OrderHandlers order_handlers{
    [](Queue& queue) {
      const py::gil_scoped_acquire gil;
      shared(queue).attr("owner").attr("synchronize")();
    },
    [](Queue& queue) {
      const py::gil_scoped_acquire gil;
      return shared(queue).attr("owner").attr("idle")().cast<bool>();
    }};

// What PyTorch's profiler asks of a device: a mark before and after each operator, and the time between two marks.
struct Profiled final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const py::gil_scoped_acquire gil;
    const auto end = [](void* mark) {
      const py::gil_scoped_acquire held;
      Py_DECREF(static_cast<PyObject*>(mark));
    };
    *event = {profiler.attr("mark")().release().ptr(), end};
    if (device != nullptr) *device = current_device();
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
  }
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub* begin,
                const torch::profiler::impl::ProfilerVoidEventStub* end) const override {
    const py::gil_scoped_acquire gil;
    return profiler.attr("elapsed_us")(mark_in(*begin), mark_in(*end)).cast<float>();
  }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int index = 0; index < device_count(); ++index) call(index);
  }
  void synchronize() const override {}
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}

 private:
  static py::object mark_in(const torch::profiler::impl::ProfilerVoidEventStub& event) {
    return py::reinterpret_borrow<py::object>(event == nullptr ? Py_None : static_cast<PyObject*>(event.get()));
  }
};

Profiled profiled;

// What a queue has of Python ends with it, but for the end of the interpreter.
void end_owner(PyObject* owner) {
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_IsFinalizing()) return;
#else
  if (_Py_IsFinalizing()) return;
#endif
  const py::gil_scoped_acquire gil;
  Py_DECREF(owner);
}

thread_local Miss* pending = nullptr;

struct Pending {  // of this thread, while Python looks at a call; calls that it makes may have their own
  explicit Pending(Miss* miss) : before(std::exchange(pending, miss)) {}
  ~Pending() { pending = before; }
  Miss* const before;
};

bool is_enum(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.real_type();
  if (type->kind() == kind) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == kind;
}

// Before 2.13, PyTorch's headers cannot make a layout of Python's.
py::object to_python(c10::Layout layout) {
  static constexpr std::array names = {"strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};
  return py::module_::import("torch").attr(names.at(static_cast<size_t>(layout)));
}

py::object to_python(const c10::IValue& value, const c10::Argument& argument) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() &&
      value.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
    return torch::jit::toPyObject(c10::IValue(value.toTensor().item()));
  if (value.isInt()) {
    if (is_enum(argument, c10::TypeKind::ScalarTypeType)) return py::cast(static_cast<c10::ScalarType>(value.toInt()));
    if (is_enum(argument, c10::TypeKind::LayoutType)) return to_python(static_cast<c10::Layout>(value.toInt()));
    if (is_enum(argument, c10::TypeKind::MemoryFormatType)) return py::cast(static_cast<c10::MemoryFormat>(value.toInt()));
  }
  return torch::jit::toPyObject(value);
}

void call_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, Miss& miss) {
  const py::gil_scoped_acquire gil;
  const Pending here(&miss);
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  py::list args;
  py::dict kwargs;
  const auto given = torch::jit::last(*stack, count);
  const auto is_default = [&](size_t at) {
    const auto& value = schema.arguments()[at].default_value();
    return value.has_value() && *value == given[at] && !value->isDouble();  // numbers travel with each call
  };
  size_t positional = 0;
  while (positional < count && !schema.arguments()[positional].kwarg_only()) ++positional;
  for (size_t at = positional; at < count; ++at) {
    const auto& argument = schema.arguments()[at];
    if (!is_default(at)) kwargs[py::str(argument.name())] = to_python(given[at], argument);
  }
  while (positional > 0 && is_default(positional - 1)) --positional;
  for (size_t at = 0; at < positional; ++at) args.append(to_python(given[at], schema.arguments()[at]));
  const py::object result = miss_function(torch::detail::getTorchApiFunction(op), py::tuple(args), kwargs);
  if (miss.learned != nullptr) return;
  const auto& returns = schema.returns();
  torch::jit::drop(*stack, count);
  if (returns.size() == 1) {
    torch::jit::push(*stack, torch::jit::toIValue(result, returns[0].real_type()));
  } else if (!returns.empty()) {
    const auto several = result.cast<py::sequence>();
    TORCH_CHECK(several.size() == returns.size(), op.operator_name(), " returns ", returns.size(), " values, not ", several.size());
    for (size_t at = 0; at < returns.size(); ++at) {
      torch::jit::push(*stack, torch::jit::toIValue(py::object(several[at]), returns[at].real_type()));
    }
  }
}

void send_full(Queue& queue) {
  const py::gil_scoped_acquire gil;
  full_function(queue.shared_from_this());
}

void record_due(Queue& queue) {
  const py::gil_scoped_acquire gil;
  due_function(queue.shared_from_this());
}

// ---- layouts: (dtype, sizes, strides, offset, bytes of the storage, conjugate, negative)

using LayoutTuple = std::tuple<c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t, bool, bool>;

Layout to_layout(const LayoutTuple& given) {
  const auto& [dtype, sizes, strides, offset, bytes, conjugate, negative] = given;
  TORCH_CHECK(sizes.size() == strides.size(), "a layout of ", sizes.size(), " sizes and ", strides.size(), " strides");
  return {dtype, Extents(sizes.begin(), sizes.end()), Extents(strides.begin(), strides.end()), offset, bytes, conjugate, negative};
}

LayoutTuple from_layout(const Layout& layout) {
  return {layout.dtype, {layout.sizes.begin(), layout.sizes.end()}, {layout.strides.begin(), layout.strides.end()},
          layout.offset, layout.storage_bytes, layout.conjugate, layout.negative};
}

Buffer& buffer(const at::Tensor& tensor) {
  auto* found = buffer_of(tensor);
  TORCH_CHECK(found != nullptr, "expected a tensor of a virtual device");
  return *found;
}

// Teaches the device the call that Python looks at; with ``ran`` it has been run, and Python returns its results.
void learn(int64_t kernel, const std::vector<std::pair<int64_t, std::optional<LayoutTuple>>>& returns,
           const std::vector<int64_t>& lengths, bool allocates, bool ran,
           const std::vector<std::pair<int64_t, LayoutTuple>>& changes) {
  TORCH_CHECK(pending != nullptr && pending->cacheable, "no call can be learned now");
  auto record = std::make_shared<Record>();
  record->key = pending->key;
  record->kernel = kernel;
  record->lengths = lengths;
  record->allocates = allocates;
  for (const auto& [input, layout] : changes) record->changes.emplace_back(input, to_layout(layout));
  for (const auto& [input, layout] : returns) {
    Return one;
    one.input = input;
    if (layout.has_value()) one.layout = to_layout(*layout);
    one.kind = layout.has_value() ? (input < 0 ? Return::kNew : Return::kView) : (input < 0 ? Return::kUndefined : Return::kInput);
    record->made += one.kind == Return::kNew;
    record->returns.push_back(std::move(one));
  }
  if (ran) {
    pending->queue->learn(std::move(record));
  } else {
    pending->learned = std::move(record);
  }
}

// ---- the cycle of a queue and its owner, for the garbage collector

Queue* queue_in(PyObject* self) {
  const auto found = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return found.holder_constructed() ? found.value_ptr<Queue>() : nullptr;
}

// What a tensor needs stays: it is part of the cycle only if no buffer, and no open device, has the queue.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const auto* queue = queue_in(self);
  if (queue != nullptr && queue->weak_from_this().use_count() == 1) Py_VISIT(queue->owner);
  return 0;
}

int clear(PyObject* self) {
  if (auto* queue = queue_in(self)) Py_CLEAR(queue->owner);
  return 0;
}

void let_collect(PyHeapTypeObject* made) {
  made->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made->ht_type.tp_traverse = &traverse;
  made->ht_type.tp_clear = &clear;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  set_handlers(&call_python, &send_full, &record_due);
  set_generator_handlers(generator_handlers);
  set_order_handlers(order_handlers);
  set_owner_end(&end_owner);
  hold_for_fork();
  torch::profiler::impl::registerPrivateUse1Methods(&profiled);
  module.def("handle", [](py::object miss, py::object full, py::object due, py::object makers, py::object profiles) {
    miss_function = std::move(miss);
    full_function = std::move(full);
    due_function = std::move(due);
    generators = std::move(makers);
    profiler = std::move(profiles);
  });
  module.def("register_kernels", &register_kernels);
  module.def("set_device_count", &set_device_count);
  py::class_<Queue, std::shared_ptr<Queue>>(module, "Queue", py::custom_type_setup(&let_collect))
      .def(py::init<c10::DeviceIndex, int64_t, size_t>(), py::arg("index"), py::arg("first_number"), py::arg("most_records"))
      .def_readonly("index", &Queue::index)
      .def_property(
          "owner", [](const Queue& self) { return py::reinterpret_borrow<py::object>(self.owner == nullptr ? Py_None : self.owner); },
          [](Queue& self, py::object owner) { Py_XSETREF(self.owner, owner.release().ptr()); })
      .def("open", [](const std::shared_ptr<Queue>& self) { set_queue(self->index, self); })
      .def("close", [](const std::shared_ptr<Queue>& self) {
        self->close();
        if (queue_of(self->index) == self) set_queue(self->index, nullptr);
      })
      .def_property_readonly("calls", &Queue::calls)
      .def_property_readonly("records", &Queue::records)
      .def_property_readonly("recorded", &Queue::recorded)
      .def("set_most_calls", &Queue::set_most_calls)
      .def_property_readonly("dead", &Queue::has_dead)
      .def("watch", &Queue::watch)
      .def("take_watched", &Queue::take_watched)
      .def("reserve", &Queue::reserve)
      .def("interrupt", &Queue::interrupt)
      .def("drop", &Queue::drop)
      .def("add_due", &Queue::add_due)
      .def("forget", &Queue::forget)
      .def("fresh", &Queue::fresh)
      .def("record", [](Queue& self, int64_t kernel, const std::vector<int64_t>& inputs, const std::vector<double>& floats, int64_t made, bool allocates) {
        Record record;
        record.kernel = kernel;
        record.made = made;
        record.allocates = allocates;
        bool full = false;
        int64_t first = 0;
        self.append(record, inputs, floats, first, full);
        return std::make_pair(first, full);
      })
      .def("make", [](const std::shared_ptr<Queue>& self, int64_t number, const LayoutTuple& layout) {
        return make_tensor(self, number, to_layout(layout));
      })
      .def("take", [](Queue& self) {
        auto batch = self.take();
        return std::make_tuple(batch.code, batch.inputs, batch.outputs, batch.strays, batch.floats);
      })
      .def("take_expected", &Queue::take_expected)
      .def("take_evicted", &Queue::take_evicted)
      .def("take_ended_generators", &Queue::take_ended_generators);
  module.def("is_virtual", [](py::handle value) {
    return THPVariable_Check(value.ptr()) && buffer_of(THPVariable_Unpack(value.ptr())) != nullptr;
  });
  module.def("queue", [](const at::Tensor& tensor) { return buffer(tensor).queue; });
  module.def("set_bell", &set_bell);
  module.def("current_device", &current_device);
  module.def("set_current_device", &set_current_device);
  module.def("after_fork", &abandon);
  module.def("learnable", [] { return pending != nullptr && pending->cacheable; });
  module.def("learn", &learn, py::arg("kernel"), py::arg("returns"), py::arg("lengths"), py::arg("allocates") = false,
             py::arg("ran") = false, py::arg("changes") = std::vector<std::pair<int64_t, LayoutTuple>>());
  module.def("origin", [](const at::Generator& generator) { return origin_of(generator); });
  module.def("make_view", [](const at::Tensor& base, const LayoutTuple& layout) { return make_view(base, to_layout(layout)); });
  module.def("relay", [](const at::Tensor& tensor, const LayoutTuple& layout) { relay(tensor, to_layout(layout)); });
  module.def("is_alone", [](py::handle value) {  // not by a copy, which would be another reference
    const auto& tensor = THPVariable_Unpack(value.ptr());
    return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  });
  module.def("note_read", [](const at::Tensor& tensor) { buffer(tensor).queue->note_read(buffer(tensor)); });
  module.def("number", [](const at::Tensor& tensor) { return buffer(tensor).number; });
  module.def("pass_on", [](const at::Tensor& tensor) { return std::exchange(buffer(tensor).number, 0); });
  module.def("layout", [](const at::Tensor& tensor) { return from_layout(Layout::of(tensor)); });
  module.def("base", [](const at::Tensor& tensor) { return from_layout(buffer(tensor).base); });
  module.def("is_base", [](const at::Tensor& tensor) { return buffer(tensor).base.fits(*tensor.unsafeGetTensorImpl()); });
  module.def("counts", [] {
    const auto now = counts();
    return std::make_pair(now.hits, now.misses);
  });
}

}  // namespace onebox
