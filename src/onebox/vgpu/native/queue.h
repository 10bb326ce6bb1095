// The recorded calls of one virtual device, and the buffers that its tensors hold.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace onebox {

using Words = c10::SmallVector<int64_t, 64>;
using Extents = c10::SmallVector<int64_t, 5>;

// How a tensor lies in its storage.
struct Layout {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  Extents sizes, strides;
  int64_t offset = 0;
  int64_t storage_bytes = 0;
  bool conjugate = false, negative = false;

  static Layout of(const at::Tensor& tensor);
  bool fits(const c10::TensorImpl& tensor) const;
};

// What a call returns at one place of its flattened results.
struct Return {
  enum Kind : uint8_t { kNew, kInput, kView, kUndefined };
  Kind kind = kUndefined;
  int64_t input = -1;  // of kInput and kView
  Layout layout;       // of kNew and kView
};

// A kind of call: what the worker runs, and what its results look like.
struct Record {
  Words key;
  int64_t kernel = 0;  // its number on the worker; 0 where nothing has to run there
  int64_t made = 0;    // new buffers of a call
  std::vector<Return> returns;
  std::vector<std::pair<int64_t, Layout>> changes;  // inputs that have another layout afterwards, such as of ``out=``
  std::vector<int64_t> lengths;  // for each return of the operator: the length of a list, or -1
  bool allocates = false;        // merely allocates its result
  bool used = true;              // since the last search for one to evict
  uint64_t numbers = 0;          // the returns that are a tensor of one element: a bit each
  mutable std::atomic<uint64_t> read{0};  // those of them that a script has read
};

class Queue;

// The elements of a storage, on a worker; freed with the storage.
struct Buffer {
  Buffer(std::shared_ptr<Queue> queue, int64_t number, Layout base, int64_t address);
  ~Buffer();
  void readdress(int64_t address);
  std::shared_ptr<Queue> queue;
  int64_t number;  // 0 where another process frees it
  Layout base;     // of the tensor that the worker holds
  int64_t address;  // that nothing lies at: unique among storages, as libraries recognise tied weights by it
  std::shared_ptr<const Record> maker;  // of a single element: the last call that has returned it, under the queue's lock
  size_t place = 0;                     // among that call's returns
};

// A batch of calls, with buffers by slots, so that a batch that occurs again is equal.
struct Batch {
  std::vector<int64_t> code, inputs, outputs, strays;
  std::vector<double> floats;
};

// The calls of one device, in the order in which the script made them.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  static constexpr int64_t kFree = 0;  // the code of a freed buffer in a batch

  Queue(c10::DeviceIndex index, int64_t first_number, size_t most_records);
  ~Queue();

  const c10::DeviceIndex index;
  struct _object* owner = nullptr;  // what Python knows of the device: a reference, which the garbage collector may end

  // Finds the record of a call, appends the call, and returns the record and the first new number; null if unknown.
  // A call that changes layouts is not appended yet.
  std::shared_ptr<const Record> append(const Words& key, c10::ArrayRef<int64_t> inputs, c10::ArrayRef<double> floats,
                                       int64_t& first, bool& full);
  // Appends a call of a record that is not looked up.
  void append(const Record& record, c10::ArrayRef<int64_t> inputs, c10::ArrayRef<double> floats, int64_t& first,
              bool& full);
  void learn(std::shared_ptr<Record> record);
  void forget();               // all records
  void drop(int64_t number);   // of a buffer whose storage was collected
  void watch(int64_t number);  // a buffer, until it is dropped
  // Single elements are expected to be read if such ones, of the same kind of call, were: a reply brings them along.
  void note_number(Buffer& buffer, const std::shared_ptr<const Record>& record, size_t place);
  void note_read(const Buffer& buffer);
  std::vector<int64_t> take_expected();  // of those that have been sent
  std::vector<int64_t> take_watched();
  int64_t reserve(int64_t count);
  void interrupt();            // something else than a call uses buffers now
  bool fresh(int64_t number);  // whether the very last call has merely allocated a buffer; takes that call back
  Batch take();
  std::vector<int64_t> take_evicted();
  void end_generator(int64_t number);
  std::vector<int64_t> take_ended_generators();
  void set_most_calls(int64_t most);
  void close();
  void abandon() { closed_.store(true); }
  void hold();  // all locks, until they are released
  void release();
  // Of what Python has to record before the next call there is one more, or one less.
  void add_due(int change) { due_.fetch_add(change); }
  bool has_due() const { return due_.load(std::memory_order_relaxed) > 0; }
  bool has_dead() const { return any_dead_.load(std::memory_order_acquire); }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  int64_t calls();
  int64_t recorded();  // calls since the start
  size_t records();

 private:
  struct Call {
    int64_t kernel, first, made;
    uint32_t inputs, floats;  // how many
  };
  void append_locked(const Record& record, c10::ArrayRef<int64_t> inputs, c10::ArrayRef<double> floats,
                     int64_t& first, bool& full);
  void bury_locked();

  struct Expected {
    int64_t number;
    std::shared_ptr<const Record> maker;
    size_t place;
    bool sent;
  };
  static constexpr size_t kMostExpected = 16;

  std::mutex mutex_, dead_mutex_;  // the second is taken last, and nothing is destroyed under it
  std::unordered_multimap<uint64_t, std::shared_ptr<Record>> records_;
  std::deque<std::shared_ptr<Record>> ages_;
  std::vector<int64_t> evicted_;
  std::vector<Call> calls_;
  int64_t buried_ = 0;  // of these, freed buffers
  std::vector<int64_t> inputs_;
  std::vector<double> floats_;
  std::vector<int64_t> dead_, ended_;
  std::unordered_set<int64_t> watched_;
  std::deque<Expected> expected_;
  std::atomic<bool> any_dead_{false}, closed_{false};
  std::atomic<int> due_{0};
  int64_t next_, recorded_ = 0;
  int64_t room_ = 0;
  int64_t most_calls_ = 64;
  size_t most_records_;
};

std::shared_ptr<Queue> queue_of(c10::DeviceIndex index);  // null where there is none
void set_queue(c10::DeviceIndex index, std::shared_ptr<Queue> queue);
void set_bell(int descriptor);  // an eventfd that is written to when a queue's first call is recorded; -1 for none
void set_owner_end(void (*end)(struct _object* owner));  // gives up a reference
void hold_for_fork();  // so that no lock is another thread's in the forked process
void abandon();  // in a forked process: all devices, whose locks other threads of its parent may hold
c10::DeviceIndex device_count();
c10::DeviceIndex most_devices();  // that there have been
c10::DeviceIndex current_device();  // of this thread
void set_current_device(c10::DeviceIndex index);
void set_device_count(c10::DeviceIndex count);

Buffer* buffer_of(const at::Tensor& tensor);  // null for tensors of other devices
at::Tensor make_tensor(const std::shared_ptr<Queue>& queue, int64_t number, const Layout& layout);
// Gives a storage memory of another size on its worker; what both sizes have keeps its content.
void resize_storage(const c10::Storage& storage, int64_t bytes);
// Gives a tensor, and its storage, the layout that a worker has given the whole buffer.
void relay(const at::Tensor& tensor, const Layout& layout);
at::Tensor make_view(const at::Tensor& base, const Layout& layout);
uint64_t hash_of(c10::ArrayRef<int64_t> words);

}  // namespace onebox
