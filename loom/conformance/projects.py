"""Table of the projects: source, version, and the tests that drive their kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Tests selected by patterns of their files. Each test runs with its `each` smallest sets of parameters; parameters
    that are text, such as the name of an activation or operator, distinguish tests."""

    name: str
    files: tuple[str, ...]
    each: int = 1
    by_text: bool = True
    at_most: int | None = None  # a cap for the default numbers of a test
    skip: tuple[str, ...] = ()  # patterns of tests that are not run; a comment next to each says why
    options: tuple[str, ...] = ()  # for pytest
    own: bool = False  # the files are Loom's, not the project's
    ci: bool = False  # part of what continuous integration runs


@dataclass(frozen=True)
class Project:
    name: str
    version: str
    suites: tuple[Suite, ...]
    pip: str | None = None  # the package on PyPI
    github: str | None = None  # owner/name; the version is a tag or commit
    tests: str | None = None  # owner/name@version where the tests are, if not with the package
    needs: tuple[str, ...] = ()  # packages that it imports besides torch and triton
    path: tuple[str, ...] = (".",)  # directories to import from
    kernels: tuple[str, ...] = (".",)  # directories that hold its kernels
    capability: tuple[int, int] = (9, 0)  # of the GPU that it is told of
    generated: str | None = None  # the environment variable of the directory to which it writes kernels
    prepare: str | None = None  # a module of `cases` that is imported before its tests
    environment: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(
        default_factory=dict
    )  # patterns of tests that fail -> why; never because of Loom

    def explain(self, test: str) -> str | None:
        """Return why this test fails, or None if that is not known."""
        return next((why for pattern, why in self.known.items() if re.search(pattern, test)), None)


INSPECTS = "inspects the output of a GPU compiler"
TESTS = ("tests/test_*.py",)


def gems(name: str, *files: str) -> Suite:
    return Suite(name, tuple(f"tests/test_{file}.py" for file in files), options=("--mode=quick",))


PROJECTS = (
    Project(
        "liger",
        "0.8.5",
        (Suite("cases", ("tests/test_liger.py",), each=1000, own=True),),
        pip="liger-kernel",
        kernels=("liger_kernel",),
    ),
    Project(
        "fla",
        "bc3b101d",
        (
            Suite("modules", ("tests/modules/test_*.py",), skip=("large_nt",)),  # minutes of PyTorch
            # Each operator once: not again with sequences packed, states transposed or other chunk sizes.
            Suite(
                "ops",
                ("tests/ops/test_*.py",),
                skip=(r"::(?!test_(chunk|fused_recurrent|parallel|fused_chunk)\[)",),
            ),
        ),
        github="fla-org/flash-linear-attention",
        needs=("einops",),
        kernels=("fla",),
        known={
            "test_cross_entropy": "the project asserts that a tensor's device is named cuda or npu",
            "test_fused_linear_cross_entropy_l2_warp": "the reference, PyTorch in fp16 on the CPU, is 2 % off float64",
            "test_layernorm.py$": "imports transformers, which is not installed",
            "test_conv_non_contiguous_dy": "slow: no result within the limit",
        },
    ),
    Project(
        "fla-core",
        "0.6.0",
        (Suite("cases", ("conformance/cases/test_fla.py",), each=1000, own=True, ci=True),),
        pip="fla-core",
        needs=("einops",),
        kernels=("fla",),
    ),
    Project(
        "flag_gems",
        "5.0.2",
        (
            gems("pointwise", "unary_pointwise_ops", "binary_pointwise_ops"),
            gems("reductions", "reduction_ops", "general_reduction_ops", "norm_ops"),
            gems("special", "special_ops", "tensor_constructor_ops", "distribution_ops", "quant"),
            gems("matrices", "blas_ops", "convolution_ops", "attention_ops"),
            Suite("cases", ("conformance/cases/test_flag_gems.py",), own=True, ci=True),
        ),
        pip="flag_gems",
        tests="FlagOpen/FlagGems@v3.0",
        needs=("sqlalchemy", "greenlet"),
        kernels=("flag_gems",),
        generated="FLAGGEMS_CACHE_DIR",
        prepare="conformance.cases.prepare_flag_gems",
        environment={"GEMS_VENDOR": "nvidia"},
        known={
            "test_accuracy_where": "the project asserts that a tensor is not on the CPU",
            "test_accuracy_trunc_divide_scalar_scalar": "the project does not round: docs/found.md",
            "test_accuracy_trunc_div_?\\[": "Loom refuses libdevice.div_rz: it rounds only to nearest",
            "test_accuracy_resolve_conj": "the project asks PyTorch for a GPU stream",
            "test_flash_(fwd_nonsquare_qk|fwd_swa)": "the reference is an operator that PyTorch has on GPUs alone",
            "test_flash_mla": "slow: no result within the limit",
        },
    ),
    Project(
        "linghe",
        "02edabd",
        (
            Suite("tests", TESTS, at_most=1024),
            Suite("cases", ("conformance/cases/test_linghe.py",), own=True),
        ),
        github="inclusionAI/linghe",
        kernels=("linghe",),
        known={
            "test_dist_loss": "wants several GPUs",
            "test_embedding.py::test_(fused_)?embedding$": "the reference adds up in bf16: it is 0.4 from float64",
            "test_triton_smooth_weighted_permute_with_indices": "the reference rounds every product to bf16",
            "test_smooth_quant_linear": "compares a product in fp8 with one in bf16, at 2 %; the project leaves it out",
            "test_varlen_mla|test_triton_batch_weighted_silu_and_block_quant": "slow: no result within the limit",
        },
    ),
    Project(
        "mamba",
        "e9594ce",
        (
            Suite("tests", ("tests/ops/triton/test_*.py",), skip=("test_mamba3_siso",)),
        ),  # minutes of PyTorch each
        github="state-spaces/mamba",
        needs=("einops",),
        kernels=("mamba_ssm",),
        known={"test_layernorm_gated.py$": "imports huggingface_hub, which is not installed"},
    ),
    Project(
        "attorch",
        "67c2772",
        (Suite("tests", TESTS),),
        github="BobMcDear/attorch",
        kernels=("attorch",),
        known={
            "boundaries.*Hardswish": "at -3 and 3 PyTorch's gradient on CPUs is not that on GPUs, which attorch has",
            "test_multi_head_attention": "the project has switched its attention off",
        },
    ),
    Project(
        "cce",
        "d42911f",
        (Suite("tests", TESTS, skip=("test_vocab_parallel",)),),  # starts processes that talk over NCCL
        github="apple/ml-cross-entropy",
        kernels=("cut_cross_entropy",),
    ),
    Project(
        "gn-kernels",
        "ba18197",
        (Suite("tests", TESTS),),
        github="gau-nernst/gn-kernels",
        kernels=("gn_kernels",),
        known={"test_cuda|test_sm120": "tests of CUDA C++ and CUTLASS, not of Triton kernels"},
    ),
    Project(
        "triton_kernels",
        "v3.7.1",
        (Suite("tests", ("python/triton_kernels/tests/test_*.py",)),),
        github="triton-lang/triton",
        path=("python/triton_kernels",),
        kernels=("python/triton_kernels/triton_kernels",),
        known={
            "test_matmul.py": "the project has tiles only for the targets cuda and hip",
            "test_make_bitmatrix_metadata": "the reference is torch.histc of int32, which PyTorch lacks on CPUs",
        },
    ),
    Project(
        "torchao",
        "0.18.0",
        (
            Suite(
                "tests",
                (
                    "test/prototype/moe_training/ep/test_kernels.py",
                    "test/prototype/moe_training/nvfp4_training/test_*_triton.py",
                    "test/prototype/blockwise_fp8_training/test_blockwise_kernels.py",
                ),
                ci=True,
            ),
        ),
        pip="torchao",
        capability=(10, 0),
        kernels=("torchao",),
    ),
    Project(
        "sglang",
        "0.5.23",
        (Suite("cases", ("conformance/cases/test_sglang.py",), own=True),),
        pip="sglang",
        kernels=("sglang",),
    ),
    Project(
        "tutorials",
        "v3.7.1",
        (Suite("cases", ("conformance/cases/test_tutorials.py",), each=1000, own=True),),
        github="triton-lang/triton",
        path=("python/tutorials",),
        kernels=("python/tutorials",),
    ),
    Project(
        "triton",
        "v3.7.1",
        (
            Suite(
                "language",
                ("python/test/unit/language/test_core.py",),
                by_text=False,
                options=("--device=cpu",),
            ),
        ),
        github="triton-lang/triton",
        kernels=(),  # the kernels are in the tests, and most are named kernel: the tests are counted
        known={
            "test_optimize_thread_locality|test_no_rematerialization_op|test_assume|test_trans_reshape": INSPECTS,
            "test_poison_return|test_tl_range_fuse|test_disable_licm": INSPECTS,
            "test_abs_fp8|test_dot_max_num_imprecise_acc": "Loom refuses fp8e4b15, a format of GPUs before Hopper",
            "test_pointer_arguments": "expects that a launch refuses tensors of the CPU",
            "test_num_warps_pow2": "expects that a launch refuses three warps; Loom has no warps",
        },
    ),
)
