"""Trainer and accelerate: the same losses and gradients with DynaFlow on as off. Steps that need gradients are not split, and say so."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import dynaflow as df
import dynaflow.integrations.accelerate  # makes the name known
from benchmarks.system_models import llama

NEEDS_GRAD = "gradients are needed: the sequential graph runs under autograd"


class Sentences(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = torch.randint(1, 60, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trained(folder, model, **settings):
    """Losses of three steps, of an evaluation behind them, and the parameters."""
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=3, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, **settings)  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], dict(model.named_parameters())


@pytest.fixture
def plain(tmp_path):
    return trained(tmp_path, llama())


def assert_same_training(got, expected):
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    torch.testing.assert_close(got[2], expected[2])


def test_trainer_with_our_backend(tmp_path, plain, counted):
    assert_same_training(trained(tmp_path, llama(), torch_compile_backend="dynaflow"), plain)
    assert counted().calls == 3 and not counted().fallbacks  # "auto" splits nothing; evaluations are not compiled by the Trainer


def test_trainer_with_an_optimized_model(tmp_path, plain):
    """Training falls back, four evaluation steps are split."""
    model = df.optimize(llama(), strategy=df.TwoBatch())
    assert_same_training(trained(tmp_path, model), plain)
    stats = df.stats(model)
    assert stats.fallbacks == {NEEDS_GRAD: 3} and stats.split_calls == 4 and stats.calls == 7, stats


def test_trainer_in_bfloat16_with_an_optimized_model(tmp_path):
    """accelerate puts autocast around the model's forward: ours is inside."""
    expected = trained(tmp_path, llama(), bf16=True)
    model = df.optimize(llama(), strategy=df.TwoBatch())
    losses, eval_loss, _ = trained(tmp_path, model, bf16=True)
    torch.testing.assert_close(losses, expected[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(eval_loss, expected[1], rtol=1e-3, atol=0)
    assert df.stats(model).fallbacks == {NEEDS_GRAD: 3} and df.stats(model).split_calls == 4


def test_gradients(counted):
    x = Sentences()[0]["input_ids"].expand(4, -1)
    grads = []
    for model in (llama().train(), df.optimize(llama().train(), strategy=df.TwoBatch())):
        model(input_ids=x, labels=x).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0])
    assert counted().fallbacks == {NEEDS_GRAD: 1}


@pytest.fixture
def accelerators():
    """An Accelerator's settings are the process's."""
    AcceleratorState._reset_state(True)
    yield Accelerator
    AcceleratorState._reset_state(True)


def test_accelerate(accelerators, counted):
    x = torch.stack([Sentences()[i]["input_ids"] for i in range(4)])
    model = accelerators(cpu=True, dynamo_backend="dynaflow").prepare(llama())
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, llama()(x).logits)
    assert counted().calls == 1 and counted().split_calls == 0


def test_accelerate_with_a_strategy(accelerators, counted):
    x = torch.stack([Sentences()[i]["input_ids"] for i in range(4)])
    plugin = TorchDynamoPlugin(backend="dynaflow", dynamic=True, options={"strategy": "two_batch", "strict": True})
    model = accelerators(cpu=True, dynamo_plugin=plugin).prepare(llama())
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, llama()(x).logits)
    assert counted().calls == counted().split_calls == 1


def test_the_name_is_like_others():
    member = DynamoBackend("DYNAFLOW")
    assert member is DynamoBackend["DYNAFLOW"] and member in list(DynamoBackend) and "DYNAFLOW" in DynamoBackend.list()
    dynaflow.integrations.accelerate.register()  # a second time changes nothing
    assert DynamoBackend.list().count("DYNAFLOW") == 1 and DynamoBackend("DYNAFLOW") is member
    with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
        DynamoBackend("DYNAFLOWS")
