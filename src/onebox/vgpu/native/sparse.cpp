// Sparse tensors in coordinate format, as gradients of embeddings: PyTorch's own pairs of indices and values, both dense
// tensors of a virtual device. What PyTorch composes of operators on these is taken from it; its other kernels look into
// memory, and those that autograd and optimizers use are composed here.

#include "recorder.h"

#include <ATen/DeviceGuard.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_dense_native.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace onebox {

namespace {

// A new sparse tensor is empty at first, on the current device: PyTorch's kernels need the right one.

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::empty_sparse_symint(sizes, dtype, layout, device, pinned, format);
}

at::Tensor of_dimensions(
    int64_t sparse, int64_t dense, at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse, dense, sizes, dtype, layout, device, pinned);
}

at::Tensor of_pair(
    int64_t sparse, int64_t dense, c10::SymIntArrayRef sizes, const at::Tensor& indices, const at::Tensor& values,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned,
    std::optional<bool> coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse, dense, sizes, indices, values, dtype, layout, values.device(), pinned, coalesced);
}

at::Tensor made(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes, bool coalesced) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse), coalesced);
}

at::Tensor with_values(const at::Tensor& self, const at::Tensor& values) {
  return made(self._indices(), values, self.sizes(), self.is_coalesced());
}

at::Tensor& set(at::Tensor& self, const at::Tensor& indices, const at::Tensor& values, bool coalesced) {
  auto* impl = static_cast<at::SparseTensorImpl*>(self.unsafeGetTensorImpl());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(coalesced);
  return self;
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> /*format*/) {
  return made(self._indices().clone(), self._values().clone(), self.sizes(), self.is_coalesced());
}

// Sorts the indices and adds up the values of each; waits for the number of unique ones.
at::Tensor coalesce(const at::Tensor& self) {
  const auto indices = self._indices(), values = self._values();
  const auto dimensions = indices.size(0);
  auto flat = at::zeros({indices.size(1)}, indices.options());
  for (int64_t at = 0; at < dimensions; ++at) flat = flat.mul(self.size(at)).add(indices.select(0, at));
  auto [left, places, counts] = at::_unique2(flat, /*sorted=*/true, /*return_inverse=*/true);
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = left.size(0);
  auto total = at::zeros(sizes, values.options());
  total.index_add_(0, places, values);
  std::vector<at::Tensor> rows(dimensions);
  for (int64_t at = dimensions - 1; at >= 0; --at) {
    rows[at] = left.remainder(self.size(at));
    left = left.div(self.size(at), "floor");
  }
  return made(dimensions == 0 ? indices.narrow(1, 0, left.size(0)) : at::stack(rows), total, self.sizes(), true);
}

at::Tensor times(const at::Tensor& values, const at::Scalar& alpha) { return alpha.equal(1) ? values : values.mul(alpha); }

at::Tensor& add_to_dense(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const auto indices = other._indices();
  const auto values = times(other._values(), alpha);
  if (indices.size(0) == 0) return self.add_(values.sum(0));
  c10::List<std::optional<at::Tensor>> places;
  for (const auto& row : indices.unbind(0)) places.push_back(row);
  return self.index_put_(places, values.to(self.scalar_type()), /*accumulate=*/true);
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!self.is_sparse()) return add_to_dense(self, other, alpha);
  TORCH_CHECK(other.is_sparse(), "add(sparse, dense) is not supported. Use add(dense, sparse) instead.");
  TORCH_CHECK(self.sizes() == other.sizes(), "expected sparse tensors of one shape, not ", self.sizes(), " and ", other.sizes());
  if (other._nnz() == 0) return self;
  const auto values = times(other._values(), alpha).to(self.scalar_type());
  if (self._nnz() == 0) return set(self, other._indices(), values, other.is_coalesced());
  return set(self, at::cat({self._indices(), other._indices()}, 1), at::cat({self._values(), values}), false);
}

at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const auto dtype = at::result_type(self, other);
  auto total = self.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  return total.add_(other, alpha);
}

// A number, or a tensor with one element, that each value is multiplied or divided by.
const at::Tensor& factor(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.is_sparse() && !other.is_sparse() && other.dim() == 0,
      "a sparse tensor times a tensor is not supported on virtual devices; make it dense with .to_dense()");
  return other;
}

at::Tensor mul(const at::Tensor& self, const at::Tensor& other) {
  if (!self.is_sparse()) return with_values(other, other._values().mul(factor(other, self)));
  return with_values(self, self._values().mul(factor(self, other)));
}

at::Tensor& mul_(at::Tensor& self, const at::Tensor& other) {
  self._values().mul_(factor(self, other));
  return self;
}

at::Tensor& mul_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  return out.is_same(self) ? mul_(out, other) : out.copy_(self.mul(other));
}

at::Tensor div(const at::Tensor& self, const at::Tensor& other) {
  return with_values(self, self._values().div(factor(self, other)));
}

at::Tensor& div_(at::Tensor& self, const at::Tensor& other) {
  self._values().div_(factor(self, other));
  return self;
}

at::Tensor neg(const at::Tensor& self) { return with_values(self, self._values().neg()); }

at::Tensor& zero_(at::Tensor& self) {
  return set(self, self._indices().narrow(1, 0, 0), self._values().narrow(0, 0, 0), true);
}

// The elements of a dense tensor where a sparse one has some.
at::Tensor mask(const at::Tensor& self, const at::Tensor& where) {
  const auto indices = where._indices();
  c10::List<std::optional<at::Tensor>> places;
  for (const auto& row : indices.unbind(0)) places.push_back(row);
  const auto dense = self.to_dense();
  return made(indices, indices.size(0) == 0 ? dense.unsqueeze(0) : dense.index(places), self.sizes(), where.is_coalesced());
}

// A sparse matrix times a dense one: adds up the rows of the latter, each times a value.
at::Tensor product(const at::Tensor& self, const at::Tensor& dense) {
  TORCH_CHECK(self.dim() == 2 && dense.dim() == 2 && self.size(1) == dense.size(0), "mat1 and mat2 shapes cannot be multiplied (",
              self.sizes(), " and ", dense.sizes(), ")");
  TORCH_CHECK(self.scalar_type() == dense.scalar_type(), "expected mat1 and mat2 to have the same dtype, but got: ",
              self.scalar_type(), " != ", dense.scalar_type());
  const auto indices = self._indices();
  const auto rows = dense.index_select(0, indices.select(0, 1)).mul(self._values().unsqueeze(1));
  return at::zeros({self.size(0), dense.size(1)}, dense.options()).index_add_(0, indices.select(0, 0), rows);
}

at::Tensor mm(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.is_sparse() != other.is_sparse() && (self.is_sparse() ? self : other).dense_dim() == 0,
      "the product of two sparse matrices is not supported on virtual devices; make one dense with .to_dense()");
  return self.is_sparse() ? product(self, other) : product(other.t(), self.t()).t().contiguous();
}

at::Tensor mv(const at::Tensor& self, const at::Tensor& other) { return self.mm(other.unsqueeze(1)).squeeze(1); }

at::Tensor addmm(const at::Tensor& self, const at::Tensor& left, const at::Tensor& right, const at::Scalar& beta, const at::Scalar& alpha) {
  const auto found = times(left.mm(right), alpha);
  return beta.equal(0) ? found.add(at::zeros_like(self)) : times(self, beta).add(found);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(), " of a sparse tensor is not supported on virtual devices; make it dense with .to_dense()");
}

// Sparse tensors in another format would be refused only later, by an operator that has nothing to do with it.
at::Tensor from_dense(const at::Tensor& self, std::optional<at::Layout> layout, at::OptionalIntArrayRef block, std::optional<int64_t> dense) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kSparse) == at::kSparse && !block.has_value(),
      "on virtual devices, sparse tensors are in coordinate format (torch.sparse_coo) only");
  const c10::DeviceGuard guard(self.device());
  return at::native::dense_to_sparse(self, layout, block, dense);
}

at::Tensor from_dense_dimensions(const at::Tensor& self, int64_t dimensions) {
  const c10::DeviceGuard guard(self.device());
  return at::native::dense_to_sparse(self, dimensions);
}

at::Tensor again(const at::Tensor& self, std::optional<at::Layout> layout, at::OptionalIntArrayRef block, std::optional<int64_t> dense) {
  return at::native::sparse_coo_to_sparse(self, layout, block, dense);
}

}  // namespace

void register_sparse(torch::Library& dense, torch::Library& sparse, torch::Library& others,
                     torch::Library& compressed) {
  dense.impl("_to_sparse", TORCH_FN(from_dense));
  dense.impl("_to_sparse.sparse_dim", TORCH_FN(from_dense_dimensions));
  sparse.impl("empty.memory_format", TORCH_FN(empty));
  sparse.impl("_sparse_coo_tensor_with_dims", TORCH_FN(of_dimensions));
  sparse.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(of_pair));
  sparse.impl("_to_sparse", TORCH_FN(again));
  sparse.impl("_to_dense", TORCH_FN(at::native::sparse_to_dense));
  sparse.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  sparse.impl("_values", TORCH_FN(at::native::_values_sparse));
  sparse.impl("indices", TORCH_FN(at::native::indices_sparse));
  sparse.impl("values", TORCH_FN(at::native::values_sparse));
  sparse.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  sparse.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  sparse.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  sparse.impl("_dimI", TORCH_FN(at::native::sparse_dim_sparse));
  sparse.impl("_dimV", TORCH_FN(at::native::dense_dim_sparse));
  sparse.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  sparse.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  sparse.impl("clone", TORCH_FN(clone));
  sparse.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
  sparse.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
  sparse.impl("sparse_resize_", TORCH_FN(at::native::sparse_resize_));
  sparse.impl("sparse_resize_and_clear_", TORCH_FN(at::native::sparse_resize_and_clear_));
  sparse.impl("_coalesce", TORCH_FN(coalesce));
  sparse.impl("sparse_mask", TORCH_FN(mask));
  sparse.impl("add.Tensor", TORCH_FN(add));
  sparse.impl("add_.Tensor", TORCH_FN(add_));
  sparse.impl("mul.Tensor", TORCH_FN(mul));
  sparse.impl("mul_.Tensor", TORCH_FN(mul_));
  sparse.impl("mul.out", TORCH_FN(mul_out));
  sparse.impl("div.Tensor", TORCH_FN(div));
  sparse.impl("div_.Tensor", TORCH_FN(div_));
  sparse.impl("neg", TORCH_FN(neg));
  sparse.impl("mm", TORCH_FN(mm));
  sparse.impl("mv", TORCH_FN(mv));
  sparse.impl("addmm", TORCH_FN(addmm));
  sparse.impl("zero_", TORCH_FN(zero_));
  others.fallback(torch::CppFunction::makeFromBoxedFunction<refuse>());
  compressed.fallback(torch::CppFunction::makeFromBoxedFunction<refuse>());  // there are such, e.g. copied to the device
}

}  // namespace onebox
