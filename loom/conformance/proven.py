"""Proofs of other projects' kernels for all sizes by `triton_loom.prove`, and the table of the results.

A test launches a kernel with numbers. The extents of its tensors become sizes (`triton_loom.prove.recording`), and the
prover is asked about all of them. The resulting contract is a guess. Where it allows sizes that no caller passes,
`ENSURED` has what callers ensure. A counterexample is a hazard of the kernel, or the contract is still too wide: each
is examined, and the result recorded in `EXAMINED`. One that is not there is a failure, and so is a kernel that is
proven in the documentation and no longer is.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from ctypes import ArgumentError
from datetime import date
from typing import Any, NamedTuple

from .judge import matching
from .projects import PROJECTS, Project
from .report import DOCS, load, source

Proof = dict[str, Any]  # the result for a kernel, and its contract; see `proof_of`


class Examined(NamedTuple):
    hazard: bool  # of the kernel, at sizes that a caller may pass; else the guessed contract is too wide
    what: str


# By project and kernel, each a pattern: callers' guarantees about the sizes, which the numbers of a launch do not show.
ENSURED: dict[tuple[str, ...], Any] = {
    # modulated_rms_norm.py:245: rows of scales divide the rows; rows_per_modulation is the quotient.
    ("liger", "_modulated_rms_norm_forward_kernel"): lambda s: [s["size_18"] == 9 * s["size_2"]],
    ("liger", "_modulated_rms_norm_backward_kernel"): lambda s: [s["n_rows"] == 9 * s["size_2"]],
    # group_norm.py:209: channels are divided among groups, three for each.
    ("liger", "_group_norm_forward_kernel"): lambda s: [
        s["size_12"] == 3 * s["Mean_row_stride"],
        s["Y_col_stride"] % 3 == 0,
    ],
    # group_norm.py:249: the same, and hidden_size, the elements of a channel, is a constant.
    ("liger", "_group_norm_backward_kernel"): lambda s: [
        s["size_12"] == 3 * s["Mean_ptr_row_stride"],
        s["size_150"] == 3 * 50,
    ],
    # poly_norm.py:233: there are three weights.
    ("liger", "_poly_norm_.*"): lambda s: [s["RSTD_row_stride"] == 3],
    # dyt.py:137: cdiv(N, 512) sums for each program.
    ("liger", "_dyt_bwd_kernel"): lambda s: [s["size_2"] == 2],
    # swiglu.py:370: a row has both halves.
    ("liger", "_swiglu_fused_gate_up_.*"): lambda s: [s["in_stride"] == 2 * 190],
    # qwen2vl_mrope.py:46: time, height and width.
    ("liger", "_triton_qwen2vl_mrope"): lambda s: [s["size_3"] == 3],
    # llama4_rope.py:111: the dimension of a head is twice head_dim_half.
    ("liger", "_llama4_rope_kernel"): lambda s: [s["q_head_stride"] == 2 * 24],
    # grpo_loss.py:665: there are logits of one token more than the L that are used.
    ("liger", "_grpo_loss_.*"): lambda s: [s["size_12"] == 11 + 1],
    # fused_moe.py:80: two experts for each token, and an end of the last expert's rows behind the six beginnings. In
    # the test there are as many tiles of rows as experts, so that no other launches are meant.
    ("liger", "_moe_router_prefix_sum_kernel"): lambda s: [s["size_7"] == 6 + 1],
    ("liger", "_token_gather_weighted_sum_kernel"): lambda s: [s["size_100"] == 2 * s["size_50"]],
    ("liger", "_fused_down_proj_kernel|_moe_bwd_dX_expanded_kernel"): lambda s: [
        s["size_7"] == s["size_6"] + 1
    ],
    ("liger", "_fused_up_proj_swiglu_kernel|_moe_bwd_(down_proj|dW1|dW2)_kernel"): lambda s: [
        s["size_7"] == s["size_6"] + 1,
        s["size_100"] == 2 * s["size_50"],
    ],
    # temperature_softmax.py:96: so many blocks of a row.
    ("sglang", "_partial_max_sumexp_kernel"): lambda s: [
        s["num_splits"] == (s["logits_row_stride"] + 2047) / 2048
    ],
    # awq_triton.py:122: eight numbers to a word, a scale to 64 rows.
    ("sglang", "awq_dequantize_kernel"): lambda s: [
        s["size_128"] == 8 * s["num_cols"],
        s["num_rows"] == 64 * s["size_3"],
    ],
    # act_quant_triton.py:104, int8_kernel.py:156, mxfp8_quant.py:66: rows are made of whole groups.
    ("sglang", "_act_quant_kernel"): lambda s: [s["N"] == 128 * s["size_3"]],
    ("sglang", "_per_token_group_quant_int8"): lambda s: [s["size_256"] == 128 * s["size_2"]],
    ("sglang", "_mxfp8_quant_kernel"): lambda s: [s["K"] == 32 * s["ssm"]],
    # bf16x3_split.py:39: three numbers for each.
    ("sglang", "_split_fp32_to_bf16x3_kernel"): lambda s: [s["size_21"] == 3 * s["size_7"]],
    # minimax_m3_swiglu.py:68: a row has both halves.
    ("sglang", "_swiglu_oai_kernel"): lambda s: [s["stride_gm"] == 2 * s["n_inter"]],
}

# Explanations of counterexamples by project, kernel and kind of obligation, each a pattern.
EXAMINED: dict[tuple[str, ...], Examined] = {
    ("liger", "_group_norm_(forward|backward)_kernel", "overflow"): Examined(
        True,
        "Batch and channel offsets have 32 bits: they wrap if X has more than 2<sup>31</sup> elements.",
    ),
    ("liger", "_attn_res_(fwd|bwd)_kernel", "overflow"): Examined(
        True,
        "Block and token offsets have 32 bits: they wrap if V has more than 2<sup>31</sup> elements.",
    ),
    ("liger", "_triton_qwen2vl_mrope", "overflow"): Examined(
        True,
        "The angles of height and width start bs * sl * hd elements after the ones before them. That offset has 32 "
        "bits and wraps from 2<sup>31</sup> on, here at 16,777,216 tokens of two sequences.",
    ),
    ("liger", "_mask_(fwd|bwd)_kernel", "overflow"): Examined(
        True,
        "The offset of a batch's head has 32 bits: it wraps if there are more than 2<sup>31</sup> scores, as with 129 "
        "heads of 4096 x 4096.",
    ),
    ("liger", "embedding_(forward|backward)_kernel", "overflow"): Examined(
        True,
        "The offset of a token's row has 32 bits: it wraps if there are more than 2<sup>31</sup> elements, as with "
        "524,289 tokens of 4096.",
    ),
    ("liger", "_fused_(up|down)_proj_.*|_moe_bwd_(down_proj|dX_expanded)_kernel", "race"): Examined(
        False,
        "Tiles begin at different rows, which the kernel that builds their list ensures. The contract allows a list in "
        "which two begin at the same row.",
    ),
    (
        "sglang",
        "_rmsnorm_fp32_kernel|_gemma_(fused_add_)?rmsnorm_kernel|_combine_kernel|_mask_and_partial_sum_kernel"
        "|merge_state_kernel|awq_dequantize_kernel|_act_quant_kernel|_split_fp32_to_bf16x3_kernel"
        "|_argmax_final_kernel|_swiglu_oai_kernel|_gemma_routing_post_topk_kernel|_per_token_group_quant_int8"
        "|_mxfp8_quant_kernel",
        "overflow",
    ): Examined(True, "Offsets have 32 bits: they wrap in tensors of more than 2<sup>31</sup> elements."),
    ("sglang", "_argmax_partial_kernel", "overflow|step"): Examined(
        True,
        "Offsets have 32 bits: they wrap in tensors of more than 2<sup>31</sup> elements. A row of 63 fewer wraps "
        "too, because its length is rounded up.",
    ),
    ("sglang", "awq_dequantize_kernel", "bounds"): Examined(
        False,
        "The group size is an argument of its own. The contract takes it for a product of sizes, which it equals in "
        "the test.",
    ),
}

PAGE = DOCS / "proven.md"
FIGURES = DOCS / "proven.json"
HEADER = """\
# Kernels of other projects, proven for all sizes

See which kernels of public projects, as they are published, [`triton_loom.prove`](prove.md) proves for all sizes, and
where it finds hazards. Repeat it in `loom/`, on a machine without a GPU:

```bash
pip install './[prove]'
python -m conformance run liger sglang --prove --limit 400   # install, run the tests, ask about each kernel
python -m conformance table --prove                          # write this page and proven.json
```
"""
TERMS = """\
- **accesses**: loads, stores and atomics, counted twice if Triton makes a kernel for 32 and one for 64-bit integers.
- **proven**: every obligation is, [of all kinds](prove.md#what-is-asked): bounds, overflow, races and so on.
- **one size**: the same, but all sizes are constants of the kernel. It is proven only for those of the test.
- **hazard**: a counterexample at sizes that a caller may give. **too wide**: the contract allows sizes that no caller
  gives. The list below each table says what each of them is, and whether the sanitizer has confirmed it by a launch.
- **unknown**: for that many obligations the solver found neither a proof nor a counterexample.
- **no answer**: not within the time limit (`--limit`), or no contract can describe the launch.

## The contracts

Each kernel is taken from the first test of [conformance](conformance.md) that launches it. Its contract is inferred
from that launch:

- **Sizes** are the extents of its tensors. They become symbols, from 1 up to the limit given, or to 2<sup>31</sup> - 1.
  Integers, strides and axes of the grid that equal such an extent, a product of two, a number of tiles or a constant
  times one follow the symbols.
- **Fixed** values stay what they were in the test: all other integers. An extent that equals one of the kernel's
  constants is fixed with it.
- **Assumed** is what callers ensure of the sizes, read from their code. "2 of memory" means that the contract assumes
  which integers are in two tensors.
- **Grid**: if it is a number, races were looked for among that many programs. If it is 1, there are none to look for.

The inferred contract is a guess. If a number fits by chance, the contract is not the one that the project's callers
keep, so read it: [proven.json](proven.json) has the whole contract of every kernel, with its assumptions in words.
"""


# -- in the process that runs a test --


def proof_of(project: str, kernel: str, launch: Any, test: str) -> Proof:
    """Prove a kernel for all launches like this one; return the result as a `Proof`."""
    from triton_loom.prove import ContractError, prove
    from triton_loom.prove.recording import described, fixed, generalized

    start = time.perf_counter()
    try:
        ensured = matching(ENSURED, project, kernel.rpartition(":")[2]) or (lambda sizes: ())
        contract = generalized(launch, ensured=ensured)
        report = prove(launch.kernel, contract)
    except ContractError as error:
        return unanswered(test, str(error))
    except (RecursionError, ArgumentError):  # the second is what the first becomes on its way through z3
        return unanswered(
            test, "its expressions are nested too deeply for the prover, as those of a sort are"
        )
    numbers = fixed(contract)
    return {
        "test": test,
        "verdict": report.verdict,
        "why": "",
        "seconds": round(time.perf_counter() - start, 1),
        "sizes": {size.name: size.high for size in contract.sizes if size.name not in numbers},
        "grid": [" ".join(str(axis).split()) for axis in contract.grid],
        "fixed": numbers,
        "contract": [line.strip() for line in described(contract).split("\n")],
        "ensured": [" ".join(str(each).split()) for each in contract.assumptions],
        "assumed": list(report.assumed),
        "accesses": len(report.of("bounds")),
        "obligations": Counter(answer.verdict for answer in report.answers),
        "open": [
            {
                "kind": answer.kind,
                "verdict": answer.verdict,
                "confirmed": answer.example.confirmed if answer.example else None,
                "text": str(answer),
            }
            for answer in report.answers
            if answer.verdict != "proven"
        ],
    }


def unanswered(test: str | None, why: str) -> Proof:
    """Return the proof of a kernel without an answer."""
    return {"test": test, "verdict": "none", "why": why, "seconds": 0, "open": []}


# -- evaluation of proofs --


def examined(project: Project, kernel: str, kind: str) -> Examined | None:
    """Return the explanation of a counterexample, or None if it was not examined."""
    return matching(EXAMINED, project.name, kernel.rpartition(":")[2], kind)


def judged(project: Project, kernel: str, proof: Proof) -> str:
    """Return the verdict of a proof in a word or two; a hazard takes precedence over a contract that is too wide."""
    if proof["verdict"] == "proven" and not proof["sizes"]:
        return "one size"
    if proof["verdict"] != "counterexample":
        return {"none": "no answer"}.get(proof["verdict"], str(proof["verdict"]))
    explanations = [examined(project, kernel, kind) for kind in _refuted(proof)]
    if None in explanations:
        return "counterexample"
    return "hazard" if any(each.hazard for each in explanations if each) else "too wide"


def _refuted(proof: Proof) -> list[str]:
    """Return the kinds of obligations that have a counterexample."""
    return sorted({answer["kind"] for answer in proof["open"] if answer["verdict"] == "counterexample"})


def unexplained(project: Project, proofs: dict[str, Proof]) -> list[str]:
    """Return counterexamples that nobody has examined, and documented proofs that no longer hold."""
    documented = json.loads(FIGURES.read_text()).get(project.name, {}) if FIGURES.exists() else {}
    lost = [
        f"{project.name}: {kernel} is not proven any more"
        for kernel, proof in documented.get("kernels", {}).items()
        if proof["verdict"] == "proven" and proofs.get(kernel, proof)["verdict"] != "proven"
    ]
    new = [
        f"{project.name}: {kernel}: {answer['text']}"
        for kernel, proof in proofs.items()
        for answer in proof["open"]
        if answer["verdict"] == "counterexample" and not examined(project, kernel, answer["kind"])
    ]
    return [*lost, *new]


def table_of(project: Project, proofs: dict[str, Proof]) -> str:
    """Return a row for each kernel, then what is not proven and why."""
    lines = [
        f"<details><summary>All {len(proofs)} kernels</summary>\n",
        "| kernel | accesses | | sizes | grid | fixed | assumed | s |",
        "| --- | ---: | --- | --- | --- | --- | --- | ---: |",
    ]
    for kernel, proof in sorted(proofs.items()):
        verdict = judged(project, kernel, proof)
        if verdict == "unknown":
            verdict = f"unknown: {proof['obligations']['unknown']} of {sum(proof['obligations'].values())}"
        cells = [f"`{kernel}`", proof.get("accesses", ""), verdict, *_numbers(proof)]
        memory = [f"{len(proof['assumed'])} of memory"] if proof.get("assumed") else []
        cells += ["; ".join([*proof.get("ensured", ()), *memory]), f"{proof['seconds']:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "\n</details>\n", *_explained(project, proofs)])


def _numbers(proof: Proof) -> tuple[str, str, str]:
    """Return the sizes, the grid, and the fixed values of a proof as texts."""
    unlimited = 2**31 - 1
    sizes = [
        f"{name} ≤ {high}" if high != unlimited else name for name, high in proof.get("sizes", {}).items()
    ]
    fixed = [f"{name} = {value}" for name, value in proof.get("fixed", {}).items()]
    axes = [axis for axis in proof.get("grid", ()) if axis != "1"] or ["1"]
    return ", ".join(sizes), f"`{' x '.join(axes)}`", ", ".join(fixed)


def _explained(project: Project, proofs: dict[str, Proof]) -> list[str]:
    lines = []
    for kernel, proof in sorted(proofs.items()):
        name = f"- `{kernel.rpartition(':')[2]}`"
        for kind in _refuted(proof):
            answers = [a for a in proof["open"] if a["kind"] == kind and a["verdict"] == "counterexample"]
            confirmed = sum(answer["confirmed"] is True for answer in answers)
            explanation = examined(project, kernel, kind)
            description = explanation.what if explanation else "Not looked into."
            first = next((a for a in answers if a["confirmed"]), answers[0])["text"]
            lines.append(
                f"{name}, {kind}, {len(answers)} ({confirmed} confirmed by the sanitizer). {description} "
                f"For instance, {first.partition(': ')[2]}."
            )
        unknown = [answer["text"] for answer in proof["open"] if answer["verdict"] == "unknown"]
        if unknown:
            lines.append(f"{name}, {len(unknown)} unknown. For instance, {unknown[0].partition(': ')[2]}.")
        if proof["why"]:
            lines.append(f"{name}, no answer: {proof['why']}.")
    return lines


def totals(projects: Iterable[tuple[Project, dict[str, Proof]]]) -> str:
    """Return a row for each project."""
    columns = ("proven", "one size", "hazard", "too wide", "unknown", "no answer")
    lines = [
        f"| project | version | kernels | {' | '.join(columns)} | accesses | s |",
        f"| --- | --- | {' | '.join('---:' for _ in range(len(columns) + 3))} |",
    ]
    for project, proofs in projects:
        counts = Counter(judged(project, kernel, proof) for kernel, proof in proofs.items())
        accesses = sum(proof.get("accesses", 0) for proof in proofs.values())
        seconds = sum(proof["seconds"] for proof in proofs.values())
        cells = [source(project), project.version, len(proofs), *(counts[column] for column in columns)]
        lines.append(f"| {' | '.join(map(str, [*cells, accesses, round(seconds)]))} |")
    return "\n".join(lines)


def write() -> None:
    """Write docs/proven.md and docs/proven.json."""
    import torch
    import triton
    import triton_loom
    import z3

    results = [
        (project, proofs) for project in PROJECTS if (proofs := load(project, ".proven.json", "proofs"))
    ]
    versions = f"Triton {triton.__version__}, Loom {triton_loom.__version__}, z3 {z3.get_version_string()}"
    versions_line = f"{date.today()}, torch {torch.__version__}, {versions}, two cores."
    parts = [
        f"## {project.name} {project.version}\n\n{table_of(project, proofs)}\n" for project, proofs in results
    ]
    PAGE.write_text("\n".join([HEADER, versions_line, "", totals(results), "", TERMS, *parts]))
    figures = {
        project.name: {
            "version": project.version,
            "kernels": {
                kernel: {"judged": judged(project, kernel, proof), **proof}
                for kernel, proof in sorted(proofs.items())
            },
        }
        for project, proofs in results
    }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
