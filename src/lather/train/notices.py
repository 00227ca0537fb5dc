"""Lines that a run shows beside the numbers of its steps: its sizes at the start, and notices of
what the user may want to change, each shown once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lather.config.config import Config
from lather.device import is_gpu
from lather.engine.step_reading import StepResult
from lather.engine.trained_parameters import trained_parameters
from lather.parallel.mesh import Mesh
from lather.train.expert_watch import WINDOW, ExpertWatch, describe, remedy
from lather.train.pace import Pace


def describe_run(
    config: Config,
    mesh: Mesh,
    num_sequences: int,
    layers_of_stage: Sequence[Sequence[int]],
) -> Iterator[str]:
    """Yield the lines on the sizes of the model, the mesh, the data and the steps."""
    ranks = "" if mesh.size == 1 else f", {mesh.describe()}"
    trained = trained_parameters(config)
    size = f"{trained.num_parameters / 1e6:.2f} M parameters"
    device = f"{mesh.device.type}{ranks}"
    data = ", ".join(map(str, config.data.path)) or config.data.source
    sequences = f"{num_sequences:,} training sequences of {data}"
    yield f"{size}, {config.optim.name}, {device}, {sequences}"
    if trained.num_trained < trained.num_parameters:
        yield trained.describe()
    tokens = config.train.batch_size * config.train.sequence_length
    yield f"peak learning rates for steps of {tokens:,} tokens: {config.optim.describe_rates()}"
    if mesh.pp > 1:
        yield f"layers by stage: {' '.join(str(len(layers)) for layers in layers_of_stage)}"


class Notices:
    """Watches the steps and validations of one launch, and shows each notice once.

    It tells of steps and held-out sets in which nothing is learned, of steps that have become slow,
    and of experts that have collapsed.
    """

    def __init__(self, config: Config, note: Callable[[str], None], mesh: Mesh) -> None:
        """`note` shows a line."""
        self._config, self._note = config, note
        self._pace = Pace(note, not is_gpu(mesh.device), mesh.size)
        self._experts = ExpertWatch(
            config.model.num_experts_per_tok,
            config.train.steps,
            is_trained=bool(config.init_from),
        )
        self._told: set[str] = set()
        """Subjects of the lines that were shown."""

    def begin(self) -> None:
        """Take the start of the first step."""
        self._pace.begin()

    def saw_step(self, number: int, result: StepResult, seconds: float) -> None:
        """Take a step, and the time that it took."""
        if result.tokens:
            self._pace.saw(seconds)
        else:
            self._once(
                "training",
                f"step {number} changed nothing and has no loss, as no token of it is learned: "
                "if many steps are like this, make the data set with the answers learned, or give "
                "more tokens per step (--train.batch-size, --train.sequence-length)",
            )
        collapsed = None if result.skipped else self._experts.saw(number, result.counts_LE)
        if collapsed is not None:
            block, least, most = collapsed
            words = describe(block, range(number - WINDOW + 1, number + 1), least, most)
            coefficient = self._config.resolved_moe().balance_coefficient or 0.0
            self._note(f"note: {words}; {remedy(coefficient)}")

    def saw_validation(
        self,
        losses: Mapping[str, float | None],
        num_sequences: Mapping[str, int],
    ) -> None:
        """Take a validation: losses, None without a label, and numbers of sequences by held-out
        set."""
        for name in (name for name, loss in losses.items() if loss is None):
            self._once(
                f"validation on {name}",
                f"no token of the {num_sequences[name]} sequences of the held-out set {name!r} is "
                "learned, so it has no loss: give one with answers to learn, or more sequences "
                "(--train.validation-sequences)",
            )

    def _once(self, subject: str, text: str) -> None:
        """Show a line, unless one on this subject was shown before."""
        if subject not in self._told:
            self._told.add(subject)
            self._note(text)
