"""What training adds around the model: true labels, lessons in looking, snapshots that go on."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from demo.batches import HUES, WHATS, Collator, dense_labels
from demo.curriculum import STAGES, held_out, step_examples
from demo.learner import Learner
from demo.pictures import Mark, Picture
from demo.snapshots import Progress, load_snapshot, save_snapshot
from demo.train import rate_at

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def learner() -> Learner:
    torch.manual_seed(0)
    return Learner(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


@pytest.fixture(scope="module")
def collate(learner: Learner) -> Collator:
    return Collator(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), learner.model)


def test_a_mark_is_labelled_in_the_patch_that_holds_its_centre() -> None:
    mark = Mark("square", "red", (255, 0, 0), x=70, y=40, radius=14)
    labels = dense_labels(Picture(96, 64, (255, 255, 255), (mark,)))
    assert [WHATS[index] for index in labels.whats] == ["nothing"] * 5 + ["square"]
    assert HUES[labels.hues[5]] == "red"
    assert labels.places[5] == pytest.approx((2 * 70 / 96 - 1, 2 * 40 / 64 - 1))
    assert labels.places[0] == pytest.approx((-2 / 3, -0.5))


def test_only_answers_are_learnt(collate: Collator) -> None:
    core = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    example = held_out("follow-up", 0, 1)
    batch = collate([example])
    learnt = core.decode(batch.labels[0][batch.labels[0] >= 0].tolist(), skip_special_tokens=False)
    assert learnt == "".join(f"{answer}<|im_end|>" for _, answer in example.turns)


def test_a_step_has_a_loss_and_gradients_for_every_part(learner: Learner, collate: Collator) -> None:
    examples = [held_out(kind, 0, 1) for kind in ("position", "which picture", "motion")]
    learner.loss(collate(examples), 1.0, answers=True).backward()  # type: ignore[no-untyped-call]
    without = [n for n, p in learner.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


def test_the_same_step_is_fed_the_same_examples() -> None:
    last = len(STAGES) - 1
    assert step_examples(STAGES[last], last, 7, 1) == step_examples(STAGES[last], last, 7, 1)
    assert step_examples(STAGES[last], last, 7, 1) != step_examples(STAGES[last], last, 8, 1)


def test_the_rate_climbs_then_falls() -> None:
    stage = STAGES[-1]
    rates = [rate_at(stage, step) for step in (0, 100, stage.steps // 2, stage.steps - 1)]
    assert rates[0] < rates[1] > rates[2] > rates[3] > 0


def test_a_run_that_goes_on_from_its_snapshot_takes_the_same_next_step(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = nn.Linear(3, 3)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(module: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    first, first_optimizer = made(0)
    step(first, first_optimizer)
    save_snapshot(tmp_path, first, first_optimizer, Progress(1, 2, 3))
    second, second_optimizer = made(1)
    assert load_snapshot(tmp_path, second, second_optimizer) == Progress(1, 2, 3)
    step(first, first_optimizer)
    step(second, second_optimizer)
    torch.testing.assert_close(first.weight, second.weight, rtol=0, atol=0)


def test_an_empty_folder_holds_no_snapshot(tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    assert load_snapshot(tmp_path, module, torch.optim.AdamW(module.parameters())) is None
