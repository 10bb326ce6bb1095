// The device as PyTorch knows it: guard, streams, hooks.

#include "recorder.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace onebox {

namespace {

thread_local c10::DeviceIndex current = 0;

OrderHandlers order;

bool is_idle(c10::DeviceIndex index) {
  const auto queue = queue_of(index);
  return queue == nullptr || order.idle(*queue);
}

void wait_for(c10::DeviceIndex index) {
  if (const auto queue = queue_of(index)) order.wait(*queue);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, current_device()}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "expected a virtual device, not ", device);
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  // Autograd has a list by device of this length, also for tensors of a pool that had more than the last one.
  c10::DeviceIndex deviceCount() const noexcept override { return most_devices(); }

  // a device has one queue, in whose order all is run: its one stream is that, and an event is never waited for here
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream.device_index()); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { wait_for(index); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new c10::DeviceIndex(stream.device_index());
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return event == nullptr || is_idle(*static_cast<c10::DeviceIndex*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(*static_cast<c10::DeviceIndex*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::DeviceIndex*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A random number generator, which lives on the device's worker.
struct VirtualGenerator final : c10::GeneratorImpl {
  VirtualGenerator(std::shared_ptr<Queue> queue, int64_t number)
      : GeneratorImpl({c10::DeviceType::PrivateUse1, queue->index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        queue(std::move(queue)), number(number) {}
  ~VirtualGenerator() override {
    if (number != 0) queue->end_generator(number);
  }
  void set_current_seed(uint64_t seed) override {
    handlers.seed(*queue, number, seed, mutex_);
    seed_ = seed;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of a virtual device has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a generator of a virtual device has no offset"); }
  void set_state(const c10::TensorImpl& state) override {
    const auto given = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state));
    handlers.set_state(*queue, number, at::Tensor(given), mutex_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return handlers.state(*queue, number, const_cast<std::mutex&>(mutex_)).getIntrusivePtr();
  }
  VirtualGenerator* clone_impl() const override {
    auto made = std::make_unique<VirtualGenerator>(queue, handlers.make(*queue));
    made->seed_ = seed_;
    const std::lock_guard<std::mutex> held(made->mutex_);
    handlers.set_state(*queue, made->number, at::Tensor(get_state()), made->mutex_);
    return made.release();
  }
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  const std::shared_ptr<Queue> queue;
  const int64_t number;
  static GeneratorHandlers handlers;

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
};

GeneratorHandlers VirtualGenerator::handlers;

std::shared_ptr<Queue> open_queue(c10::DeviceIndex index) {
  auto found = queue_of(index < 0 ? current_device() : index);
  TORCH_CHECK(found != nullptr, "there is no virtual device ", index);
  return found;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::mutex mutex;
    static auto& generators = *new std::unordered_map<c10::DeviceIndex, at::Generator>;
    auto queue = open_queue(index);
    const std::lock_guard<std::mutex> lock(mutex);
    auto& found = generators[queue->index];
    if (!found.defined() || origin_of(found).first != queue) found = at::make_generator<VirtualGenerator>(queue, 0);
    return found;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    const auto queue = open_queue(index);
    return at::make_generator<VirtualGenerator>(queue, VirtualGenerator::handlers.make(*queue));
  }
  c10::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK(false, "nothing in this process lies at an address of a virtual device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, static_cast<int64_t>(bytes));
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
};

Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

c10::DeviceIndex current_device() { return current < std::max<c10::DeviceIndex>(device_count(), 1) ? current : 0; }
void set_current_device(c10::DeviceIndex index) { current = index; }

void set_generator_handlers(const GeneratorHandlers& handlers) { VirtualGenerator::handlers = handlers; }

std::pair<std::shared_ptr<Queue>, int64_t> origin_of(const at::Generator& generator) {
  const auto* virtual_one = dynamic_cast<const VirtualGenerator*>(generator.unsafeGetGeneratorImpl());
  if (virtual_one == nullptr) return {nullptr, 0};
  return {virtual_one->queue, virtual_one->number};
}

void set_order_handlers(const OrderHandlers& handlers) { order = handlers; }

}  // namespace onebox
