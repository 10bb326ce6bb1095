#include "recorder.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/native/Resize.h>

#include <cstring>
#include <unordered_set>

namespace onebox {

namespace {

MissHandler on_miss = nullptr;
QueueHandler on_full = nullptr, on_due = nullptr;
std::atomic<int64_t> hits{0}, misses{0};

// Words that begin an argument in a key; what follows has a length that they determine.
enum Tag : int64_t { kNone = 1, kInt, kFloat, kTrue, kFalse, kComplex, kString, kDevice, kList, kTensor, kNoTensor, kBase, kGenerator };

// An operator's arguments, as far as a record depends on them.
struct Scan {
  Words key;
  c10::SmallVector<int64_t, 8> inputs;
  c10::SmallVector<double, 4> floats;
  c10::SmallVector<const at::Tensor*, 8> tensors;
  std::shared_ptr<Queue> queue;
  const Queue* generators = nullptr;  // whose generators there are
  bool floats_in_key = false;

  bool add(const c10::IValue& value);
  void add_same(size_t written);

 private:
  bool add_tensor(const at::Tensor& tensor);
  void add_float(double value);
  void add_complex(c10::complex<double> number);
  bool add_number(const at::Tensor& tensor);
};

void Scan::add_float(double value) {
  key.push_back(kFloat);
  if (floats_in_key) {
    int64_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    key.push_back(word);
  } else {
    floats.push_back(value);
  }
}

// Adds a Python number that PyTorch has wrapped in a tensor of the host.
bool Scan::add_number(const at::Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu() || tensor.dim() != 0) return false;
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      add_float(*static_cast<const double*>(tensor.const_data_ptr()));
      return true;
    case c10::ScalarType::Long:
      key.push_back(kInt);
      key.push_back(*static_cast<const int64_t*>(tensor.const_data_ptr()));
      return true;
    case c10::ScalarType::Bool:
      key.push_back(*static_cast<const bool*>(tensor.const_data_ptr()) ? kTrue : kFalse);
      return true;
    case c10::ScalarType::ComplexDouble:
      add_complex(*static_cast<const c10::complex<double>*>(tensor.const_data_ptr()));
      return true;
    default:
      return false;
  }
}

void Scan::add_complex(c10::complex<double> number) {
  key.push_back(kComplex);
  for (const double part : {number.real(), number.imag()}) {
    int64_t word = 0;
    std::memcpy(&word, &part, sizeof word);
    key.push_back(word);
  }
}

bool Scan::add_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(kNoTensor);
    return true;
  }
  const auto* buffer = buffer_of(tensor);
  if (buffer == nullptr) return add_number(tensor);
  if (queue == nullptr) {
    queue = buffer->queue;
  } else if (queue != buffer->queue) {
    return false;
  }
  inputs.push_back(buffer->number);
  tensors.push_back(&tensor);
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const auto dtype = static_cast<int64_t>(tensor.scalar_type());
  const auto sizes = impl.sizes(), strides = impl.strides();
  const auto bits = (tensor.is_conj() ? 1 : 0) | (tensor.is_neg() ? 2 : 0);
  const bool whole = buffer->base.fits(impl);
  key.push_back((whole ? kBase : kTensor) | dtype << 8 | static_cast<int64_t>(sizes.size()) << 16 | bits << 24);
  key.append(sizes.begin(), sizes.end());
  key.append(strides.begin(), strides.end());
  key.push_back(impl.storage_offset());
  key.push_back(static_cast<int64_t>(impl.unsafe_storage().nbytes()));
  if (!whole) key.push_back(buffer->base.offset * static_cast<int64_t>(c10::elementSize(buffer->base.dtype)));
  return true;
}

// Adds which other arguments are the very tensor that is written to: such a one gets no other layout.
void Scan::add_same(size_t written) {
  for (size_t other = 0; other < tensors.size(); ++other) {
    if (other != written && tensors[other]->is_same(*tensors[written])) {
      key.append({static_cast<int64_t>(written), static_cast<int64_t>(other)});
    }
  }
}

bool Scan::add(const c10::IValue& value) {
  if (value.isTensor()) return add_tensor(value.toTensor());
  if (value.isNone()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.push_back(kInt);
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? kTrue : kFalse);
  } else if (value.isDouble()) {
    add_float(value.toDouble());
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    key.push_back(kList | static_cast<int64_t>(list.size()) << 8 | int64_t{1} << 62);
    for (const int64_t one : list) key.push_back(one);
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.push_back(kList | static_cast<int64_t>(list.size()) << 8);
    for (const auto& one : list) {
      if (!add(one)) return false;
    }
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    key.push_back(kDevice);
    const auto index = device.is_privateuseone() && !device.has_index() ? current_device() : device.index();
    key.push_back(static_cast<int64_t>(device.type()) << 8 | (index & 255));
  } else if (value.isComplexDouble()) {
    add_complex(value.toComplexDouble());
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    key.push_back(kString | static_cast<int64_t>(text.size()) << 8);
    for (size_t at = 0; at < text.size(); at += 8) {
      int64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
      key.push_back(word);
    }
  } else if (value.isGenerator()) {
    const auto [owner, number] = origin_of(value.toGenerator());
    if (owner == nullptr || (generators != nullptr && generators != owner.get())) return false;
    generators = owner.get();
    key.push_back(kGenerator);
    key.push_back(number);
  } else {
    return false;
  }
  return true;
}

// The device of an operator without tensors, from its arguments.
c10::DeviceIndex device_among(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().is_privateuseone() && value.toDevice().has_index()) return value.toDevice().index();
  }
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index();
}

at::Tensor returned(const Return& value, const Scan& scan, int64_t& number) {
  switch (value.kind) {
    case Return::kNew:
      return make_tensor(scan.queue, number++, value.layout);
    case Return::kInput:
      return *scan.tensors[value.input];
    case Return::kView:
      return make_view(*scan.tensors[value.input], value.layout);
    default:
      return {};
  }
}

// Whether a tensor is a single element with a storage of its own.
bool is_number(int64_t elements, int64_t storage_bytes) { return elements == 1 && storage_bytes <= 16; }

uint64_t numbers_among(const Record& record, const Scan& scan) {
  uint64_t found = 0;
  for (size_t at = 0; at < std::min<size_t>(record.returns.size(), 64); ++at) {
    const auto& value = record.returns[at];
    const bool is_new = value.kind == Return::kNew, is_input = value.kind == Return::kInput;
    if (!is_new && !is_input) continue;
    const auto layout = is_new ? value.layout : Layout::of(*scan.tensors[value.input]);
    if (is_number(c10::multiply_integers(layout.sizes), layout.storage_bytes)) found |= uint64_t{1} << at;
  }
  return found;
}

// Replaces an operator's arguments by its results.
void finish(const std::shared_ptr<const Record>& kept, const Scan& scan, int64_t number, size_t arguments,
            torch::jit::Stack* stack) {
  const auto& record = *kept;
  c10::SmallVector<c10::IValue, 4> results;
  size_t at = 0;
  const auto make = [&] {
    auto made = returned(record.returns[at], scan, number);
    if (at < 64 && (record.numbers >> at & 1) != 0) scan.queue->note_number(*buffer_of(made), kept, at);
    ++at;
    return made;
  };
  for (const auto length : record.lengths) {
    if (length < 0) {
      results.emplace_back(make());
      continue;
    }
    c10::List<at::Tensor> list;
    list.reserve(length);
    for (int64_t one = 0; one < length; ++one) list.push_back(make());
    results.emplace_back(std::move(list));
  }
  torch::jit::drop(*stack, arguments);
  for (auto& result : results) torch::jit::push(*stack, std::move(result));
}

// Which arguments an operator writes to: the lists of tensors among them, or the others.
std::vector<bool> written_arguments(const c10::FunctionSchema& schema, bool lists) {
  std::vector<bool> found;
  for (size_t at = 0; at < schema.arguments().size(); ++at) {
    const auto& argument = schema.arguments()[at];
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
    if ((argument.type()->kind() == c10::TypeKind::ListType) != lists) continue;
    found.resize(at + 1);
    found[at] = true;
  }
  return found;
}

// The lists whose versions this device has to raise: of some operators, PyTorch's kernels raise none, either.
std::vector<bool> versioned_lists(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  if (name.rfind("aten::_amp_foreach_", 0) == 0 || name.rfind("aten::_fused_", 0) == 0) return {};
  return written_arguments(schema, true);
}

struct Recorder final : c10::OperatorKernel {
  Recorder() = default;  // of operators that are never recorded under a number
  Recorder(int64_t id, bool floats_in_key, const c10::FunctionSchema& schema)
      : id(id), floats_in_key(floats_in_key), written(written_arguments(schema, false)), written_lists(versioned_lists(schema)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto count = op.schema().arguments().size();
    const auto arguments = c10::ArrayRef<c10::IValue>(torch::jit::last(*stack, count));
    Scan scan;
    scan.floats_in_key = floats_in_key;
    scan.key.push_back(id);
    bool simple = id != 0;
    std::vector<int64_t> versioned;
    c10::SmallVector<size_t, 4> outs;
    for (size_t at = 0; simple && at < count; ++at) {
      const auto before = scan.tensors.size();
      simple = scan.add(arguments[at]);
      if (at < written_lists.size() && written_lists[at]) {
        for (auto input = before; input < scan.tensors.size(); ++input) versioned.push_back(input);
      }
      if (at < written.size() && written[at] && scan.tensors.size() > before) outs.push_back(before);
    }
    for (const auto one : outs) scan.add_same(one);
    if (scan.queue == nullptr) scan.queue = queue_of(device_among(arguments));
    simple = simple && scan.queue != nullptr && !scan.queue->closed();
    simple = simple && (scan.generators == nullptr || scan.generators == scan.queue.get());
    int64_t first = 0;
    bool full = false;
    if (simple) {
      if (scan.queue->has_due()) on_due(*scan.queue);
      if (const auto record = scan.queue->append(scan.key, scan.inputs, scan.floats, first, full)) {
        hits.fetch_add(1, std::memory_order_relaxed);
        if (!record->changes.empty()) append_changing(*record, scan, first, full);
        raise_versions(scan, versioned);
        finish(record, scan, first, count, stack);
        if (full) on_full(*scan.queue);
        return;
      }
    }
    misses.fetch_add(1, std::memory_order_relaxed);
    Miss miss{scan.queue.get(), scan.key, simple, nullptr};
    on_miss(op, stack, miss);
    if (miss.learned == nullptr) return;
    miss.learned->numbers = numbers_among(*miss.learned, scan);
    append_changing(*miss.learned, scan, first, full);
    scan.queue->learn(miss.learned);
    raise_versions(scan, versioned);
    finish(miss.learned, scan, first, count, stack);
    if (full) on_full(*scan.queue);
  }

  // Gives arguments their other layouts, which PyTorch may refuse, and appends the call.
  static void append_changing(const Record& record, const Scan& scan, int64_t& first, bool& full) {
    for (const auto& [input, layout] : record.changes) relay(*scan.tensors[input], layout);
    scan.queue->append(record, scan.inputs, scan.floats, first, full);
  }

  // PyTorch raises the version of a single tensor above the device, but leaves lists to the device's kernels.
  static void raise_versions(const Scan& scan, const std::vector<int64_t>& inputs) {
    for (const auto input : inputs) scan.tensors[input]->unsafeGetTensorImpl()->bump_version();
  }

  const int64_t id = 0;  // of the operator in keys; 0 for those that are never recorded under one
  const bool floats_in_key = false;
  const std::vector<bool> written, written_lists;  // for each argument up to the last such tensor, or such list
};

// Operators that change only how a tensor lies in its storage, beside those whose schema says so.
const std::unordered_set<std::string> composed = {
    "aten::_chunk_cat", "aten::_has_same_storage_numel", "aten::is_pinned", "aten::_fw_primal", "aten::_make_dual",  "aten::_reshape_copy", "aten::_unpack_dual", "aten::_unsafe_view",
    "aten::as_strided_", "aten::detach_", "aten::is_same_size", "aten::squeeze_", "aten::t_", "aten::transpose_",
    "aten::unsqueeze_"};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns()) {
    if (value.alias_info() != nullptr && !value.alias_info()->isWrite()) return true;
  }
  return false;
}

// Gives a tensor's storage the bytes that its layout needs.
void grow(const at::Tensor& self) {
  const auto& impl = *self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytes(impl.sizes(), impl.strides(), impl.dtype().itemsize(),
                                                      impl.storage_offset());
  if (impl.numel() > 0 && bytes > impl.unsafe_storage().nbytes()) resize_storage(self.storage(), static_cast<int64_t>(bytes));
}

// Whether a tensor may be given another one's data, as ``model.to`` does: also one of the host's.
bool shares_kind(const at::Tensor& self, const at::Tensor& other) {
  return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto& impl = *self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl.set_sizes_contiguous(sizes);
  if (format.has_value()) impl.empty_tensor_restride(*format);
  grow(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_offset(offset);
  if (strides.data() == nullptr) {
    impl.set_sizes_contiguous(sizes);
  } else {
    impl.set_sizes_and_strides(sizes, strides);
  }
  grow(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()
      ? self
      : set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

std::vector<torch::Library>& libraries() {
  static std::vector<torch::Library> kept;
  return kept;
}

}  // namespace

void set_handlers(MissHandler miss, QueueHandler full, QueueHandler due) {
  on_miss = miss;
  on_full = full;
  on_due = due;
}

Counts counts() { return {hits.load(), misses.load()}; }

void register_kernels(const std::vector<std::string>& shaped_by_floats) {
  if (!libraries().empty()) return;
  const std::unordered_set<std::string> shaped(shaped_by_floats.begin(), shaped_by_floats.end());
  libraries().reserve(5);  // references stay
  auto& library = libraries().emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(shares_kind));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  register_sparse(
      library,
      libraries().emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__),
      libraries().emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__),
      libraries().emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::SparseCsrPrivateUse1, __FILE__, __LINE__));
  int64_t id = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value() || is_view(op->schema()) || composed.count(name.name) != 0) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    auto kernel = std::make_unique<Recorder>(++id, shaped.count(full) != 0, op->schema());
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  auto& others = libraries().emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others.fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>()));
}

}  // namespace onebox
