#include "queue.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace onebox {

// ---- layouts

Layout Layout::of(const at::Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  return {tensor.scalar_type(),
          Extents(impl.sizes().begin(), impl.sizes().end()),
          Extents(impl.strides().begin(), impl.strides().end()),
          impl.storage_offset(),
          static_cast<int64_t>(impl.unsafe_storage().nbytes()),
          tensor.is_conj(),
          tensor.is_neg()};
}

bool Layout::fits(const c10::TensorImpl& tensor) const {
  const auto bits = tensor.key_set();
  return c10::typeMetaToScalarType(tensor.dtype()) == dtype && tensor.sizes() == c10::IntArrayRef(sizes) &&
         tensor.strides() == c10::IntArrayRef(strides) && tensor.storage_offset() == offset &&
         bits.has(c10::DispatchKey::Conjugate) == conjugate && bits.has(c10::DispatchKey::Negative) == negative;
}

// ---- calls

namespace {

std::atomic<int> bell{-1};

void ring() {
  const uint64_t one = 1;
  if (const auto descriptor = bell.load(std::memory_order_relaxed); descriptor >= 0) {
    [[maybe_unused]] const auto written = ::write(descriptor, &one, sizeof one);
  }
}

}  // namespace

void set_bell(int descriptor) { bell.store(descriptor); }

uint64_t hash_of(c10::ArrayRef<int64_t> words) {
  uint64_t hash = 0x9e3779b97f4a7c15ULL * (words.size() + 1);
  for (const auto word : words) {
    hash ^= static_cast<uint64_t>(word);
    hash *= 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

namespace {

// PyTorch writes a storage to a file through a tensor of its own at the same address.
struct Addresses {
  std::mutex mutex;
  std::unordered_map<int64_t, Buffer*> buffers;
};
Addresses& addresses() {
  static auto& kept = *new Addresses;  // some storages are collected when the process ends
  return kept;
}

}  // namespace

Buffer::Buffer(std::shared_ptr<Queue> queue, int64_t number, Layout base, int64_t address)
    : queue(std::move(queue)), number(number), base(std::move(base)), address(0) {
  readdress(address);
}

Buffer::~Buffer() {
  readdress(0);
  if (number != 0) queue->drop(number);
}

void Buffer::readdress(int64_t other) {
  if (other == address) return;
  const std::lock_guard<std::mutex> lock(addresses().mutex);
  if (address != 0) addresses().buffers.erase(address);
  if (other != 0) addresses().buffers[other] = this;
  address = other;
}

void Queue::drop(int64_t number) {
  if (closed()) return;
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  watched_.erase(number);
  dead_.push_back(number);
  any_dead_.store(true, std::memory_order_release);
  const auto same = [number](const Expected& one) { return one.number == number; };
  expected_.erase(std::remove_if(expected_.begin(), expected_.end(), same), expected_.end());
}

void Queue::note_number(Buffer& buffer, const std::shared_ptr<const Record>& record, size_t place) {
  std::shared_ptr<const Record> before = record;  // ends after the lock
  std::optional<Expected> oldest;
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  buffer.maker.swap(before);
  buffer.place = place;
  if ((record->read.load(std::memory_order_relaxed) >> place & 1) == 0 || buffer.number == 0) return;
  for (const auto& one : expected_) {
    if (one.number == buffer.number) return;
  }
  if (expected_.size() == kMostExpected) {
    oldest = std::move(expected_.front());
    expected_.pop_front();
  }
  expected_.push_back({buffer.number, record, place, false});
}

void Queue::note_read(const Buffer& buffer) {
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  if (buffer.maker != nullptr) buffer.maker->read.fetch_or(uint64_t{1} << buffer.place);
}

std::vector<int64_t> Queue::take_expected() {
  std::deque<Expected> sent, waiting;
  {
    const std::lock_guard<std::mutex> lock(dead_mutex_);
    for (auto& one : expected_) (one.sent ? sent : waiting).push_back(std::move(one));
    expected_.swap(waiting);
  }
  std::vector<int64_t> found;
  for (const auto& one : sent) {
    one.maker->read.fetch_and(~(uint64_t{1} << one.place));  // until it is read
    found.push_back(one.number);
  }
  return found;
}

void Queue::watch(int64_t number) {
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  watched_.insert(number);
}

std::vector<int64_t> Queue::take_watched() {
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  std::vector<int64_t> found(watched_.begin(), watched_.end());
  watched_.clear();
  return found;
}

void Queue::hold() {
  mutex_.lock();
  dead_mutex_.lock();
}

void Queue::release() {
  dead_mutex_.unlock();
  mutex_.unlock();
}

void Queue::bury_locked() {
  if (!any_dead_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  for (const auto number : dead_) calls_.push_back({kFree, number, 0, 0, 0});
  buried_ += static_cast<int64_t>(dead_.size());
  dead_.clear();
  any_dead_.store(false, std::memory_order_release);
}

std::shared_ptr<const Record> Queue::append(const Words& key, c10::ArrayRef<int64_t> inputs,
                                            c10::ArrayRef<double> floats, int64_t& first, bool& full) {
  const auto hash = hash_of(key);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto range = records_.equal_range(hash);
  for (auto found = range.first; found != range.second; ++found) {
    if (found->second->key == key) {
      found->second->used = true;
      if (found->second->changes.empty()) append_locked(*found->second, inputs, floats, first, full);
      return found->second;
    }
  }
  return nullptr;
}

void Queue::append(const Record& record, c10::ArrayRef<int64_t> inputs, c10::ArrayRef<double> floats, int64_t& first,
                   bool& full) {
  const std::lock_guard<std::mutex> lock(mutex_);
  append_locked(record, inputs, floats, first, full);
}

void Queue::append_locked(const Record& record, c10::ArrayRef<int64_t> inputs, c10::ArrayRef<double> floats,
                          int64_t& first, bool& full) {
  full = false;
  first = next_;
  if (record.kernel == 0) return;
  if (calls_.empty()) ring();
  bury_locked();
  next_ += record.made;
  ++recorded_;
  calls_.push_back({record.kernel, first, record.made, static_cast<uint32_t>(inputs.size()),
                    static_cast<uint32_t>(floats.size())});
  inputs_.insert(inputs_.end(), inputs.begin(), inputs.end());
  floats_.insert(floats_.end(), floats.begin(), floats.end());
  room_ = record.allocates ? first : 0;
  full = static_cast<int64_t>(calls_.size()) - buried_ >= most_calls_;
}

void Queue::learn(std::shared_ptr<Record> record) {
  const auto hash = hash_of(record->key);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto range = records_.equal_range(hash);
  for (auto found = range.first; found != range.second; ++found) {
    if (found->second->key == record->key) return;  // another thread was faster
  }
  while (ages_.size() >= most_records_) {  // the oldest that has not been used for a round
    auto oldest = std::move(ages_.front());
    ages_.pop_front();
    if (oldest->used) {
      oldest->used = false;
      ages_.push_back(std::move(oldest));
      continue;
    }
    const auto same = records_.equal_range(hash_of(oldest->key));
    for (auto found = same.first; found != same.second; ++found) {
      if (found->second == oldest) {
        records_.erase(found);
        break;
      }
    }
    if (oldest->kernel != 0) evicted_.push_back(oldest->kernel);
  }
  ages_.push_back(record);
  records_.emplace(hash, std::move(record));
}

void Queue::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& record : ages_) {
    if (record->kernel != 0) evicted_.push_back(record->kernel);
  }
  ages_.clear();
  records_.clear();
}

int64_t Queue::reserve(int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto first = next_;
  next_ += count;
  return first;
}

void Queue::interrupt() {
  const std::lock_guard<std::mutex> lock(mutex_);
  room_ = 0;
}

bool Queue::fresh(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (room_ != number) return false;
  room_ = 0;
  if (!calls_.empty() && calls_.back().kernel != kFree && calls_.back().first == number) {
    inputs_.resize(inputs_.size() - calls_.back().inputs);
    floats_.resize(floats_.size() - calls_.back().floats);
    calls_.pop_back();
  }
  return true;
}

Batch Queue::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  bury_locked();
  {
    const std::lock_guard<std::mutex> dead_lock(dead_mutex_);
    for (auto& one : expected_) one.sent = true;
  }
  Batch batch;
  std::unordered_map<int64_t, int64_t> slots;  // of the buffers that are alive
  size_t at = 0;
  int64_t made = 0;
  for (const auto& call : calls_) {
    if (call.kernel == kFree) {
      const auto slot = slots.find(call.first);
      if (slot == slots.end()) {
        batch.strays.push_back(call.first);
      } else {
        batch.code.push_back(kFree);
        batch.code.push_back(slot->second);
        slots.erase(slot);
      }
      continue;
    }
    batch.code.push_back(call.kernel);
    for (uint32_t number = 0; number < call.inputs; ++number) {
      const auto input = inputs_[at++];
      auto slot = slots.find(input);
      if (slot == slots.end()) {
        batch.inputs.push_back(input);
        slot = slots.emplace(input, -static_cast<int64_t>(batch.inputs.size())).first;
      }
      batch.code.push_back(slot->second);
    }
    for (auto number = call.first; number < call.first + call.made; ++number) slots[number] = made++;
  }
  std::vector<std::pair<int64_t, int64_t>> left;
  for (const auto& [number, slot] : slots) {
    if (slot >= 0) left.emplace_back(slot, number);
  }
  std::sort(left.begin(), left.end());
  for (const auto& one : left) batch.outputs.push_back(one.second);
  batch.floats.swap(floats_);
  buried_ = 0;
  calls_.clear();
  inputs_.clear();
  return batch;
}

std::vector<int64_t> Queue::take_evicted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(evicted_, {});
}

void Queue::end_generator(int64_t number) {
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  ended_.push_back(number);
}

std::vector<int64_t> Queue::take_ended_generators() {
  const std::lock_guard<std::mutex> lock(dead_mutex_);
  return std::exchange(ended_, {});
}

void Queue::set_most_calls(int64_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  most_calls_ = most;
}

void Queue::close() {
  closed_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.clear();
  ages_.clear();
  buried_ = 0;
  calls_.clear();
  inputs_.clear();
  floats_.clear();
}

int64_t Queue::calls() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(calls_.size());
}

int64_t Queue::recorded() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

size_t Queue::records() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return records_.size();
}

// ---- devices

namespace {

std::mutex queues_mutex;
std::array<std::shared_ptr<Queue>, 256> queues;
auto& living = *new std::unordered_set<Queue*>;  // also those of devices that have other queues now
void (*end_owner)(struct _object* owner) = nullptr;
std::atomic<c10::DeviceIndex> count{0}, most{0};

}  // namespace

Queue::Queue(c10::DeviceIndex index, int64_t first_number, size_t most_records)
    : index(index), next_(first_number), most_records_(most_records) {
  const std::lock_guard<std::mutex> lock(queues_mutex);
  living.insert(this);
}

Queue::~Queue() {
  {
    const std::lock_guard<std::mutex> lock(queues_mutex);
    living.erase(this);
  }
  if (owner != nullptr) end_owner(owner);
}

void set_owner_end(void (*end)(struct _object* owner)) { end_owner = end; }

std::shared_ptr<Queue> queue_of(c10::DeviceIndex index) {
  if (index < 0 || static_cast<size_t>(index) >= queues.size()) return nullptr;
  const std::lock_guard<std::mutex> lock(queues_mutex);
  return queues[index];
}

void set_queue(c10::DeviceIndex index, std::shared_ptr<Queue> queue) {
  TORCH_CHECK(index >= 0 && static_cast<size_t>(index) < queues.size(), "there is no virtual device ", index);
  const std::lock_guard<std::mutex> lock(queues_mutex);
  queues[index].swap(queue);  // the one before ends with this function's argument, after the lock
}

void hold_for_fork() {
  const auto hold = [] {
    queues_mutex.lock();
    for (auto* queue : living) queue->hold();
    addresses().mutex.lock();
  };
  const auto release = [] {
    addresses().mutex.unlock();
    for (auto* queue : living) queue->release();
    queues_mutex.unlock();
  };
  pthread_atfork(hold, release, release);
}

void abandon() {
  for (auto* queue : living) queue->abandon();
}

c10::DeviceIndex device_count() { return count.load(std::memory_order_relaxed); }
c10::DeviceIndex most_devices() { return most.load(std::memory_order_relaxed); }
void set_device_count(c10::DeviceIndex number) {
  const std::lock_guard<std::mutex> lock(queues_mutex);
  count.store(number);
  most.store(std::max(most.load(), number));
}

// ---- tensors

namespace {

void release(void* context) { delete static_cast<Buffer*>(context); }

// Where PyTorch makes a storage by itself, its memory is that of a new tensor.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(guard->getDevice()))
        .storage().set_data_ptr({});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the elements of a virtual device are on a worker, and not in this process");
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)
std::atomic<int64_t> address{int64_t{1} << 44};

int64_t new_address(int64_t bytes) { return bytes == 0 ? 0 : address.fetch_add((bytes / 256 + 1) * 256); }

void lay_out(c10::TensorImpl& tensor, const Layout& layout) {
  tensor.set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
  if (layout.conjugate) tensor._set_conj(true);
  if (layout.negative) tensor._set_neg(true);
}

}  // namespace

Buffer* buffer_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || !impl->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit) || !impl->has_storage()) return nullptr;
  const auto& data = impl->unsafe_storage().data_ptr();
  if (data.get_deleter() == &release) return static_cast<Buffer*>(data.get_context());
  if (data.get() == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(addresses().mutex);
  const auto found = addresses().buffers.find(reinterpret_cast<int64_t>(data.get()));
  return found == addresses().buffers.end() ? nullptr : found->second;
}

at::Tensor make_tensor(const std::shared_ptr<Queue>& queue, int64_t number, const Layout& layout) {
  const auto bytes = layout.storage_bytes;
  const auto place = new_address(bytes);
  auto* buffer = new Buffer(queue, number, layout, place);
  c10::DataPtr data(reinterpret_cast<void*>(place), buffer, &release,
                    c10::Device(c10::DeviceType::PrivateUse1, queue->index));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                       &allocator, /*resizable=*/true);
  auto made = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(layout.dtype));
  lay_out(*made.unsafeGetTensorImpl(), layout);
  return at::Tensor(std::move(made));
}

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  const auto before = static_cast<int64_t>(storage.nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  const auto made = at::empty({bytes}, options);
  if (const auto common = std::min(before, bytes); common > 0) {
    const auto old = at::empty({0}, options).set_(storage, 0, {common}, {1});
    made.narrow(0, 0, common).copy_(old);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(made.storage().set_data_ptr({}));
  impl->set_nbytes(static_cast<size_t>(bytes));
}

void relay(const at::Tensor& tensor, const Layout& layout) {
  auto& impl = *tensor.unsafeGetTensorImpl();
  auto* buffer = buffer_of(tensor);
  const bool whole = buffer != nullptr && buffer->base.fits(impl);
  lay_out(impl, layout);
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (buffer != nullptr && layout.storage_bytes > static_cast<int64_t>(storage.nbytes())) {
    buffer->readdress(new_address(layout.storage_bytes));
    auto data = storage.set_data_ptr({});
    const auto device = data.device();
    storage.set_data_ptr_noswap({reinterpret_cast<void*>(buffer->address), data.release_context(), &release, device});
  }
  storage.set_nbytes(static_cast<size_t>(layout.storage_bytes));
  if (whole) buffer->base = layout;
}

at::Tensor make_view(const at::Tensor& base, const Layout& layout) {
  const auto lazy = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto made = at::detail::make_tensor_base<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                            base.key_set() - lazy,
                                                            c10::scalarTypeToTypeMeta(layout.dtype));
  lay_out(*made.unsafeGetTensorImpl(), layout);
  return at::Tensor(std::move(made));
}

}  // namespace onebox
