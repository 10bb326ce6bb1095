// Records operators on virtual tensors: the kernel that PyTorch's dispatcher calls for each.

#pragma once

#include "queue.h"

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace onebox {

// A call that no record is known for, while Python looks at it.
struct Miss {
  Queue* queue = nullptr;
  Words key;
  bool cacheable = false;  // all tensors are of one virtual device, and all other arguments are part of the key
  std::shared_ptr<Record> learned;
};

// Set by the module. The first handles a miss: it pushes the results, or sets what was learned. The second sends the
// calls of a queue that is full. The third records what is due before the next call.
using MissHandler = void (*)(const c10::OperatorHandle& op, torch::jit::Stack* stack, Miss& miss);
using QueueHandler = void (*)(Queue& queue);

// What Python does for generators, which live on workers; ``number`` 0 is a device's own. Torch holds a generator's mutex
// meanwhile, and Python lets its lock go while it waits for a worker: each lets the mutex go.
struct GeneratorHandlers {
  int64_t (*make)(Queue& queue);  // returns its number
  void (*seed)(Queue& queue, int64_t number, uint64_t seed, std::mutex& held);
  at::Tensor (*state)(Queue& queue, int64_t number, std::mutex& held);
  void (*set_state)(Queue& queue, int64_t number, const at::Tensor& state, std::mutex& held);
};
void set_generator_handlers(const GeneratorHandlers& handlers);
// The device of a generator, and its number there; null for one that is none of a virtual device.
std::pair<std::shared_ptr<Queue>, int64_t> origin_of(const at::Generator& generator);

// What streams and events wait for, and whether nothing is left to be done.
struct OrderHandlers {
  void (*wait)(Queue& queue);
  bool (*idle)(Queue& queue);
};
void set_order_handlers(const OrderHandlers& handlers);

void set_handlers(MissHandler miss, QueueHandler full, QueueHandler due);
void register_kernels(const std::vector<std::string>& shaped_by_floats);
void register_sparse(torch::Library& dense, torch::Library& sparse, torch::Library& others,
                     torch::Library& compressed);

struct Counts {
  int64_t hits, misses;
};
Counts counts();

}  // namespace onebox
