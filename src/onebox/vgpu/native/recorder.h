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

// What Python does for generators, which live on workers; ``number`` 0 is a device's own.
struct GeneratorHandlers {
  int64_t (*make)(c10::DeviceIndex index);  // returns its number
  void (*seed)(c10::DeviceIndex index, int64_t number, uint64_t seed);
  at::Tensor (*state)(c10::DeviceIndex index, int64_t number);
  void (*set_state)(c10::DeviceIndex index, int64_t number, const at::Tensor& state);
};
void set_generator_handlers(const GeneratorHandlers& handlers);
int64_t generator_number(const at::Generator& generator);  // -1 for one of another device

void set_handlers(MissHandler miss, QueueHandler full, QueueHandler due);
void register_kernels(const std::vector<std::string>& shaped_by_floats);
void register_sparse(torch::Library& dense, torch::Library& sparse, torch::Library& others,
                     torch::Library& compressed);

struct Counts {
  int64_t hits, misses;
};
Counts counts();

}  // namespace onebox
