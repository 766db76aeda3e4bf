"""Who runs a graph's shape arithmetic: what ONNX Runtime leaves to the CPU, and what its own refusal makes of it."""

from __future__ import annotations

from collections import Counter

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.cudart import open_runtime
from tests.gpu.proof.experiments.sessions import Session, Way, load_onnxruntime, on_cpu, opened, relative_error

_CPU = "CPUExecutionProvider"
_SIZES = (1, 4)
# What computes a shape and touches no picture.
_SHAPE_KINDS = frozenset(
    ["Shape", "Slice", "Concat", "Mul", "Gather", "Unsqueeze", "Squeeze", "Cast", "Constant", "Add", "Div", "Floor"]
)


def shape_nodes(bench: Bench) -> None:
    """Opened with the CPU forbidden and allowed; where it opens: who got which node, and whether it answers right."""
    runtime, ort = open_runtime(), load_onnxruntime()
    model = networks.resizing(bench.folder / "resizing.onnx")
    bench.step("with the CPU forbidden")
    try:
        with opened(runtime, ort, model, Way()):
            bench.figure("opens with the CPU forbidden", True)
    except Exception as error:  # onnxruntime's errors share no base class
        bench.figure("opens with the CPU forbidden", False)
        bench.fact("refusal", error)
    bench.step("with the CPU allowed")
    batch = networks.pictures(max(_SIZES), 32)
    with opened(runtime, ort, model, Way(), may_use_cpu=True, records=True) as session:
        _tell_assignment(bench, session)
        for size in _SIZES:
            session.bind(batch[:size])
            expected = on_cpu(ort, model, batch[:size])
            bench.figure(f"batch {size}: error", relative_error(session.answer(size), expected))


def _tell_assignment(bench: Bench, session: Session) -> None:
    if not hasattr(session.session, "get_provider_graph_assignment_info"):
        bench.fact("assignment", "this onnxruntime does not tell")
        return
    by_provider: dict[str, Counter[str]] = {}
    for part in session.session.get_provider_graph_assignment_info():
        kinds = by_provider.setdefault(str(part.ep_name), Counter())
        kinds.update(str(node.op_type) for node in part.get_nodes())
    for name, kinds in by_provider.items():
        bench.fact(f"on {name}", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    left = by_provider.get(_CPU, Counter())
    bench.figure("nodes on the CPU", sum(left.values()))
    bench.figure("nodes on the CPU that touch pictures", sum(left[kind] for kind in left if kind not in _SHAPE_KINDS))


def judge_shape_nodes(ran: Ran) -> Judgement:
    """Refused with the CPU forbidden, although only shapes are worked out there."""
    refused = not ran.figures["opens with the CPU forbidden"]
    errors = [error for name, error in ran.figures.items() if name.endswith(": error")]
    touching = ran.figures.get("nodes on the CPU that touch pictures")
    told = (
        f"{'refused' if refused else 'opened'} with the CPU forbidden; with the CPU allowed it has "
        f"{ran.facts.get(f'on {_CPU}', 'nothing')}, worst error {max(errors):.1e}"
    )
    return Judgement.of(refused and touching == 0 and max(errors) < 1e-3, told)
