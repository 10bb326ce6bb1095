"""The allow-lists: pinned, made by the rules, and without anything that a worker must not do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import overload
from onebox.worker.sandbox.allow_list import EAGER, PROGRAMS, allowed, pinned_names
from tests.kit.operator_rules import allowed_by_rule, eager_by_rule, names_by_rule

PINNED_WITH = "2.13"


OWN = ("attention", "attention_backward", "recurrent", "recurrent_backward")

LISTS = [PROGRAMS, EAGER]


@pytest.mark.parametrize(("file", "rule"), [(PROGRAMS, allowed_by_rule), (EAGER, eager_by_rule)])
def test_the_pinned_list_is_what_the_rule_admits(file: str, rule: Callable[[OpOverload], bool]) -> None:
    if not torch.__version__.startswith(PINNED_WITH + "."):
        pytest.skip(f"the list is pinned with torch {PINNED_WITH}, this is {torch.__version__}")
    found, pinned = set(names_by_rule(rule)), pinned_names(file)
    assert found == pinned, f"new: {sorted(found - pinned)}; gone: {sorted(pinned - found)}: read them, then pin them"


@pytest.mark.parametrize("file", LISTS)
def test_the_pinned_list_is_a_sorted_list_of_names(file: str) -> None:
    names = sorted(pinned_names(file))
    assert len(names) > 700
    own = [name for name in names if not re.fullmatch(r"aten\.\w+\.\w+", name)]
    assert own == [f"onebox.{name}.default" for name in OWN]


def test_kernels_may_name_what_programs_may_name() -> None:
    assert pinned_names(PROGRAMS) < pinned_names(EAGER)


@pytest.mark.parametrize("file", LISTS)
def test_every_pinned_operator_is_there(file: str) -> None:
    if not torch.__version__.startswith(PINNED_WITH + "."):
        pytest.skip(f"the list is pinned with torch {PINNED_WITH}, this is {torch.__version__}")
    assert all(allowed(name, file) is overload(name) for name in pinned_names(file))


def _schemas(file: str) -> dict[str, torch.FunctionSchema]:
    found = {}
    for name in pinned_names(file):
        with contextlib.suppress(WireError):  # of another torch
            found[name] = overload(name)._schema
    return found


@pytest.fixture(scope="module")
def schemas() -> dict[str, torch.FunctionSchema]:
    return _schemas(PROGRAMS)


@pytest.fixture(scope="module")
def all_schemas() -> dict[str, torch.FunctionSchema]:
    return _schemas(EAGER)


def test_nothing_writes_to_its_arguments(schemas: dict[str, torch.FunctionSchema]) -> None:
    for name, schema in schemas.items():
        assert not schema.is_mutable, name
        assert not any(a.alias_info and a.alias_info.is_write for a in (*schema.arguments, *schema.returns)), name
        assert not any(argument.is_out for argument in schema.arguments), name
        base = name.split(".")[1]
        assert not base.endswith("_") or base.endswith("__"), name


def test_nothing_takes_a_storage_a_stream_or_a_class(all_schemas: dict[str, torch.FunctionSchema]) -> None:
    for name, schema in all_schemas.items():
        for argument in schema.arguments:
            kind = str(argument.type)
            assert not re.search(r"Storage|Stream|__torch__|Any|Dict|Future|RRef|Capsule", kind), f"{name}: {kind}"


def test_text_is_never_the_name_of_a_file(all_schemas: dict[str, torch.FunctionSchema]) -> None:
    texts = {a.name for schema in all_schemas.values() for a in schema.arguments if "str" in str(a.type)}
    texts.remove("api_name")  # of _linalg_check_errors, which puts it into a message
    assert not {name for name in texts if re.search("file|path|url|name|code|expr", name)}, texts


def test_no_name_has_to_do_with_files_processes_or_other_devices() -> None:
    words = r"file|save|load|pickle|storage|print|debug|profil|record|c10d|rpc|async_|pin_memory|set_data|from_blob"
    known = r"functional_assert|_debug_has_internal_overlap|set_.source_Tensor_storage_offset"
    assert [n for n in sorted(pinned_names(EAGER)) if re.search(words, n) and not re.search(known, n)] == []


def test_kernels_return_tensors_and_numbers_only(all_schemas: dict[str, torch.FunctionSchema]) -> None:
    kinds = {str(value.type) for schema in all_schemas.values() for value in schema.returns}
    assert kinds == {"Tensor", "List[Tensor]", "bool", "int", "number"}


@pytest.mark.feature("Security: Run only operators of a list")
@pytest.mark.parametrize(
    "name",
    [
        "aten.native_batch_norm.default", "aten.batch_norm.default", "aten.instance_norm.default",
        "aten.cudnn_batch_norm.default", "aten._copy_from.default", "aten._no_grad_embedding_renorm_.default",
        "aten.add_.Tensor", "aten.add.out", "aten.from_file.default", "aten.nonzero.default", "aten.item.default",
        "aten.set_.source_Storage", "aten.resize_.default", "aten._local_scalar_dense.default",
        "aten.is_pinned.default", "aten.record_stream.default", "aten.normal_functional.nothing", "",
        "aten._reshape_alias.default",
    ],
)  # fmt: skip
def test_what_must_not_be_on_it(name: str) -> None:
    with pytest.raises(WireError, match="allow-list"):
        allowed(name)


@pytest.mark.parametrize(
    "name",
    [
        "aten.save.default", "aten.from_file.default", "aten.from_file.out", "aten.set_.source_Storage",
        "aten.set_.source_Storage_storage_offset", "aten.record_stream.default", "aten._pin_memory.default",
        "aten._pin_memory.out", "aten.set_data.default", "aten.backward.default", "aten._backward.default",
        "aten.grad.default", "aten._reshape_alias.default", "aten.to_sparse.default", "aten.retain_grad.default",
        "aten.quantize_per_tensor.default", "aten._nested_view_from_buffer.default", "aten.warn.default",
        "aten.is_pinned.default", "aten._test_optional_intlist.default", "aten.manual_seed.default",
        "aten.wait.default", "prim.print.default", "aten.segment_reduce.default", "aten._sobol_engine_draw.default",
        "aten._sobol_engine_ff_.default", "aten._convert_indices_from_coo_to_csr.default",
        "aten._convert_indices_from_csr_to_coo.default", "aten.mkldnn_rnn_layer.default", "aten._fused_sgd.default",
        "aten._embedding_bag_dense_backward.default", "aten.batch_norm_update_stats.default",
        "aten._cummax_helper.default", "aten._efficientzerotensor.default", "aten._lazy_clone.default",
        "aten._foreach_copy.out", "aten._ctc_loss.out", "aten.max_pool2d_with_indices_backward.grad_input",
        "aten._logcumsumexp.default", "aten._compute_linear_combination.default", "aten._cholesky_solve_helper.default",
        "aten._chunk_cat.default",
        "aten.empty.out", "aten.lstm.input", "aten.embedding_bag.default", "aten.ctc_loss.IntList",
    ],
)  # fmt: skip
def test_what_no_kernel_may_name(name: str) -> None:
    with pytest.raises(WireError, match="allow-list"):
        allowed(name, EAGER)


@pytest.mark.parametrize(
    "name",
    [
        "aten.add_.Tensor", "aten.add.out", "aten._foreach_add.List", "aten._foreach_addcdiv_.ScalarList",
        "aten._foreach_norm.Scalar", "aten._fused_adam_.default", "aten._fused_adamw_.tensor_lr",
        "aten.normal_.default", "aten.randn.generator", "aten.bernoulli_.float", "aten.randperm.generator",
        "aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.unique_dim.default",
        "aten.equal.default", "aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.allclose.default",
        "aten.native_batch_norm.default", "aten._native_batch_norm_legit.default", "aten.set_.source_Tensor",
        "aten.set_.source_Tensor_storage_offset", "aten.resize_.default", "aten.as_strided.default",
        "aten.as_strided_.default", "aten.copy_.default", "aten._to_copy.default", "aten.empty.memory_format",
        "aten.index_put_.default", "aten.bincount.default", "aten.repeat_interleave.Tensor", "aten.nonzero.out",
        "aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._amp_update_scale_.default",
        "aten.embedding_renorm_.default", "aten._fused_sgd_.default", "aten.rrelu_with_noise.default",
        "aten.multinomial.default", "aten.softmax.int_out", "aten._fft_c2c.out", "aten._linalg_svd.U",
        "aten.logcumsumexp.default", "aten.cholesky_solve.default",
        "aten.linalg_matrix_exp.default",
    ],
)  # fmt: skip
def test_what_ordinary_scripts_need_is_on_the_list_of_kernels(name: str) -> None:
    assert allowed(name, EAGER) is overload(name)


@pytest.mark.parametrize(
    "name",
    [
        "aten.addmm.default", "aten.convolution.default", "aten.convolution_backward.default", "aten.view.default",
        "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default",
        "aten.native_dropout.default", "aten.embedding.default", "aten.embedding_dense_backward.default",
        "aten._log_softmax.default", "aten.nll_loss_forward.default", "aten.max_pool2d_with_indices.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.native_layer_norm.default",
        "aten._unsafe_index.Tensor", "aten.zeros.default", "aten.mul.Scalar",
    ],
)  # fmt: skip
def test_what_ordinary_models_need_is_on_it(name: str) -> None:
    assert allowed(name) is overload(name)
    assert allowed_by_rule(overload(name))


def test_unmarked_writers_are_known() -> None:
    """The reason why the rule names them: this torch does not."""
    mean, variance, x = torch.zeros(3), torch.ones(3), torch.randn(4, 3)
    norm = torch.ops.aten.native_batch_norm.default
    assert not norm._schema.is_mutable
    norm(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert mean.any(), "it no longer writes to the running mean: the rule may be shorter"
    assert not allowed_by_rule(norm)
