// The device as PyTorch knows it: guard, streams, hooks.

#include "recorder.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace onebox {

namespace {

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, current}; }
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
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A random number generator, which lives on the device's worker.
struct VirtualGenerator final : c10::GeneratorImpl {
  VirtualGenerator(c10::DeviceIndex index, int64_t number)
      : GeneratorImpl({c10::DeviceType::PrivateUse1, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        number(number) {}
  ~VirtualGenerator() override {
    const auto queue = queue_of(device_.index());
    if (number != 0 && queue != nullptr) queue->end_generator(number);
  }
  void set_current_seed(uint64_t seed) override {
    handlers.seed(device_.index(), number, seed);
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
    handlers.set_state(device_.index(), number, at::Tensor(given));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return handlers.state(device_.index(), number).getIntrusivePtr();
  }
  VirtualGenerator* clone_impl() const override {
    auto made = std::make_unique<VirtualGenerator>(device_.index(), handlers.make(device_.index()));
    made->seed_ = seed_;
    handlers.set_state(device_.index(), made->number, at::Tensor(get_state()));
    return made.release();
  }
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  const int64_t number;
  static GeneratorHandlers handlers;

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
};

GeneratorHandlers VirtualGenerator::handlers;

c10::DeviceIndex numbered(c10::DeviceIndex index) { return index < 0 ? current : index; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::mutex mutex;
    static std::unordered_map<c10::DeviceIndex, at::Generator> generators;
    const std::lock_guard<std::mutex> lock(mutex);
    auto& found = generators[numbered(index)];
    if (!found.defined()) found = at::make_generator<VirtualGenerator>(numbered(index), 0);
    return found;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<VirtualGenerator>(numbered(index), VirtualGenerator::handlers.make(numbered(index)));
  }
  c10::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK(false, "nothing in this process lies at an address of a virtual device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, static_cast<int64_t>(bytes));
  }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
};

Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

c10::DeviceIndex current_device() { return current; }
void set_current_device(c10::DeviceIndex index) { current = index; }

void set_generator_handlers(const GeneratorHandlers& handlers) { VirtualGenerator::handlers = handlers; }

int64_t generator_number(const at::Generator& generator) {
  const auto* virtual_one = dynamic_cast<const VirtualGenerator*>(generator.unsafeGetGeneratorImpl());
  return virtual_one == nullptr ? -1 : virtual_one->number;
}

}  // namespace onebox
