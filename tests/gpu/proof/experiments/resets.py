"""ONNX Runtime beside a broken device: whether a session can be closed, and whether a reset heals a later one."""

from __future__ import annotations

from typing import Any

from tests.gpu.proof.experiment import Bench, Judgement, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.breakage import launch, works
from tests.gpu.proof.experiments.cudart import Runtime, open_runtime
from tests.gpu.proof.experiments.sessions import Session, Way, load_onnxruntime, on_cpu, relative_error

_SMALL = {"side": 64, "blocks": (1, 1, 1, 1), "width": 16, "classes": 10}
# The status after the harmful kernel: without it, or with 0, nothing was asked of a broken device.
_BROKEN = "broken, cudaDeviceSynchronize"


def session_after_reset(bench: Bench, **network: Any) -> None:
    """One session before, the kernel, the reset; then a new session is opened, run and compared."""
    runtime, ort = open_runtime(), load_onnxruntime()
    model, batch = _network(bench, network)
    expected = on_cpu(ort, model, batch)
    before = _ready(runtime, ort, model, batch, Way())
    bench.figure("before: error", relative_error(before.answer(len(batch)), expected))
    _break(bench, runtime)
    bench.step("healing: cudaDeviceReset")
    for name, *given in (("cudaDeviceReset",), ("cudaSetDevice", 0), ("cudaDeviceSynchronize",)):
        bench.figure(f"healing, {name}", runtime.status(name, *given))
    bench.figure("CUDA healed", works(runtime))
    bench.step("a new session beside the old one")
    try:
        after = _ready(runtime, ort, model, batch, Way())
        bench.figure("after: error", relative_error(after.answer(len(batch)), expected))
    except Exception as error:  # what is expected; onnxruntime's errors share no base class
        bench.fact("refusal", error)
    else:
        bench.step("closing the new session")
        after.close()
    bench.step("dropping the old session")
    before.session = None
    bench.step("leaving the process")


def judge_session_after_reset(ran: Ran) -> Judgement:
    """ONNX Runtime is not healed: its new session fails, or the process dies of it."""
    if not ran.figures.get(_BROKEN):
        return _nothing_broken(ran)
    heals = ran.figures.get("after: error", 1.0) < 1e-2 and ran.ended == "done"
    healed = "healed" if ran.figures.get("CUDA healed") else "not healed"
    came = "a new session answers right, too" if heals else f"ONNX Runtime: {ran.facts.get('refusal', ran.how)}"
    return Judgement.of(not heals, f"CUDA is {healed} by the reset; {came}")


def close_after_break(bench: Bench, **network: Any) -> None:
    """A session with a captured graph is dropped after a kernel has broken the device."""
    runtime, ort = open_runtime(), load_onnxruntime()
    model, batch = _network(bench, network)
    session = _ready(runtime, ort, model, batch, Way(graphs=True))
    _break(bench, runtime)
    bench.step("a run on the broken device")
    try:
        session.run(len(batch))
        bench.fact("a run says", "nothing")
    except Exception as error:  # onnxruntime's errors share no base class
        bench.fact("a run says", error)
    bench.step("dropping the session")
    session.session = None
    bench.figure("the session was dropped", True)
    bench.step("leaving the process")


def judge_close_after_break(ran: Ran) -> Judgement:
    """Its destructor throws, and the process ends."""
    if not ran.figures.get(_BROKEN):
        return _nothing_broken(ran)
    said = ran.facts.get("a run says", "not asked")
    if ran.ended == "crashed":
        return Judgement.of(True, f"{ran.how} after: {ran.steps[-1]}; a run before it said: {said}")
    return Judgement.of(False, f"the process lived through it; a run before it said: {said}")


def _network(bench: Bench, network: dict[str, Any]) -> tuple[Any, Any]:
    shape = _SMALL | network
    model = networks.resnet(bench.folder / "network.onnx", half=False, **shape)  # type: ignore[arg-type]
    return model, networks.pictures(2, int(str(shape["side"])))


def _ready(runtime: Runtime, ort: Any, model: Any, batch: Any, way: Way) -> Session:
    session = Session(runtime, ort, model, way)
    session.settle(session.bind(batch))
    return session


def _nothing_broken(ran: Ran) -> Judgement:
    came = f"{ran.how} after: {ran.steps[-1]}" if ran.how and ran.steps else ran.how or "the kernel did no harm"
    return Judgement.of(False, f"the device was never broken: {came}")


def _break(bench: Bench, runtime: Runtime) -> None:
    bench.step("launching the harmful kernel")
    launch(runtime, "address")
    bench.figure(_BROKEN, runtime.status("cudaDeviceSynchronize"))
