"""diffusers: the same images with DynaFlow on as off, and how many denoising steps were split."""

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import DDPMPipeline, DDPMScheduler, FluxImg2ImgPipeline, UNet2DModel

import dynaflow as df
from benchmarks.system_models import PIPELINES, pixels, request
from dynaflow import errors
from dynaflow.integrations.diffusers import Controlled

NUM_STEPS = 2
# calls of a denoiser per step of the pipeline: guidance is one batch, or two calls
NUM_CALLS = {"flux": 1, "sd3": 1, "sdxl": 1, "wan": 2}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def images(name, pipe, num_images=2, **changes):
    return pixels(pipe(**{**request(name, num_images, NUM_STEPS), **changes}))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.Branches(3), "auto"], ids=lambda s: type(s).__name__)
def test_pipeline(name, strategy):
    expected = images(name, PIPELINES[name]())
    assert expected.isfinite().all() and expected.std() > 0.01
    pipe = df.optimize(PIPELINES[name](), strategy=strategy, strict=True)
    made = images(name, pipe)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    # parts are rounded otherwise, and so are Inductor's kernels
    assert torch.equal(made, expected) or not isinstance(strategy, df.Branches)
    stats, num_calls = df.stats(pipe), NUM_STEPS * NUM_CALLS[name]
    assert stats.calls == num_calls and stats.captures == 1 and not stats.fallbacks, stats
    assert stats.split_calls == (num_calls if isinstance(strategy, df.TwoBatch) else 0), stats


@pytest.mark.parametrize("name", ["sd3", "sdxl"])
def test_halves_of_the_guidance_are_parts(name):
    """One image: the batch is its unguided and its guided half."""
    pipe = df.optimize(PIPELINES[name](), strategy=df.TwoBatch(), strict=True)
    torch.testing.assert_close(images(name, pipe, 1), images(name, PIPELINES[name](), 1), rtol=1e-4, atol=1e-5)
    assert df.stats(pipe).split_calls == NUM_STEPS


def test_guidance_in_two_calls_of_one_image_falls_back():
    pipe = df.optimize(PIPELINES["wan"](), strategy=df.TwoBatch())
    torch.testing.assert_close(images("wan", pipe, 1), images("wan", PIPELINES["wan"](), 1), rtol=1e-4, atol=1e-5)
    assert df.stats(pipe).fallbacks == {"batch smaller than 2": 2 * NUM_STEPS}


def streams_of(module, arguments):
    """The stream of each op under `Branches`, and which ops each op depends on, directly or not."""
    explained = df.explain(module, arguments, strategy=df.Branches(4))
    behind = [set() for _ in explained.flow.ops]
    for edge in sorted(explained.flow.edges, key=lambda e: e.after):
        behind[edge.after] |= behind[edge.before] | {explained.flow.ops[edge.before].name}
    stream = {name: launch.stream for launch in explained.plan.launches for name, _ in launch.calls}
    return stream, {op.name: before for op, before in zip(explained.flow.ops, behind)}


def first_call(pipe, name, module):
    """The arguments of the pipeline's first call of a module."""
    calls = []
    handle = module.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    images(name, pipe)
    handle.remove()
    return calls[0]


@pytest.mark.parametrize("name, text, image", [
    ("flux", "transformer_blocks.0.attn.add_q_proj", "transformer_blocks.0.attn.to_q"),
    ("sd3", "transformer_blocks.0.attn.add_q_proj", "transformer_blocks.0.attn.to_q"),
])  # fmt: skip
def test_text_and_image_streams_of_a_block_run_side_by_side(name, text, image):
    pipe = PIPELINES[name]()
    _, kwargs = first_call(pipe, name, pipe.transformer)
    stream, behind = streams_of(pipe.transformer, kwargs)
    assert text not in behind[image] and image not in behind[text] and stream[text] != stream[image]


def test_controlnet_runs_beside_the_unets_encoder():
    pipe = PIPELINES["sdxl"]()
    control, (args, kwargs) = (first_call(pipe, "sdxl", module) for module in (pipe.controlnet, pipe.unet))
    others = {k: v for k, v in kwargs.items() if "additional_residual" not in k}
    names = dict(zip(("sample", "timestep"), args))
    stream, behind = streams_of(Controlled(pipe.unet, pipe.controlnet), {"control": control, **names, **others})
    controls = {op for op in stream if op.startswith("controlnet.")}
    encoders = {op for op in stream if op.startswith("unet.down_blocks.")}
    assert controls and encoders and not any(controls & behind[op] for op in encoders)
    # beside one another: on other streams, and neither depends on the other
    assert any(stream[a] != stream[b] and a not in behind[b] and b not in behind[a] for a in controls for b in encoders)
    assert any(controls & behind[op] for op in stream if op.startswith("unet.up_blocks."))


@pytest.mark.parametrize("changes", [{"guess_mode": True}, {"control_guidance_end": 0.4}, {"controlnet_conditioning_scale": 0.3}], ids=str)
def test_a_controlnet_whose_results_the_pipeline_works_on(changes):
    """In guess mode the pipeline itself joins the ControlNet's results with zeros: it and the UNet are two calls then."""
    pipe = df.optimize(PIPELINES["sdxl"](), strategy=df.TwoBatch())
    torch.testing.assert_close(images("sdxl", pipe, **changes), images("sdxl", PIPELINES["sdxl"](), **changes), rtol=1e-4, atol=1e-5)
    stats = df.stats(pipe)
    assert stats.calls == stats.split_calls == NUM_STEPS * (2 if "guess_mode" in changes else 1) and not stats.fallbacks, stats


def test_what_a_controlnet_will_return_may_be_looked_at():
    pipe = df.optimize(PIPELINES["sdxl"](), strategy=df.TwoBatch(), strict=True)
    plain = PIPELINES["sdxl"]()
    args, kwargs = first_call(plain, "sdxl", plain.controlnet)
    down, mid = plain.controlnet(*args, **kwargs)
    down_later, mid_later = pipe.controlnet(*args, **kwargs)
    assert df.stats(pipe).calls == 0
    assert mid_later.shape == mid.shape and len(down_later) == len(down) and df.stats(pipe).calls == 1
    for value, same in ((mid, mid_later), (mid * 2, 2 * mid_later), (mid + 1, mid_later + 1), (down[0], down_later[0])):
        torch.testing.assert_close(torch.as_tensor(same + 0), value)
    torch.testing.assert_close(torch.cat([mid_later, mid_later]), torch.cat([mid, mid]))
    torch.testing.assert_close(mid - mid_later, torch.zeros_like(mid), rtol=0, atol=1e-6)
    for value, same in zip(down, down_later):
        torch.testing.assert_close(same, value)
    assert df.stats(pipe).calls == 1  # the call was made once


def test_restore():
    pipe = df.optimize(PIPELINES["sdxl"](), strategy=df.TwoBatch())
    assert df.restore(pipe) is pipe and not {"forward", "_dynaflow_optimized"} & (vars(pipe.unet).keys() | vars(pipe.controlnet).keys())
    assert torch.equal(images("sdxl", pipe), images("sdxl", PIPELINES["sdxl"]()))


def test_somebody_elses_forward_stays_in_place():
    """Then UNet and ControlNet are compiled each for itself."""
    pipe = PIPELINES["sdxl"]()
    theirs = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: tuple(y * 0.5 for y in theirs(*args, **kwargs))
    expected = images("sdxl", pipe)
    df.optimize(pipe, strategy=df.TwoBatch())
    torch.testing.assert_close(images("sdxl", pipe), expected, rtol=1e-4, atol=1e-5)
    assert df.stats(pipe).split_calls == 2 * NUM_STEPS


def test_a_part_of_a_pipeline():
    pipe = PIPELINES["sd3"]()
    df.optimize(pipe.transformer, strategy=df.TwoBatch(), strict=True)
    torch.testing.assert_close(images("sd3", pipe), images("sd3", PIPELINES["sd3"]()), rtol=1e-4, atol=1e-5)
    assert df.stats(pipe.transformer).split_calls == NUM_STEPS


def test_another_pipeline_of_the_same_modules():
    """`from_pipe` shares them: what is compiled in one is compiled in the other, and may be undone there."""
    def again(pipe):
        other = FluxImg2ImgPipeline.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        return other

    pipe, plain = df.optimize(PIPELINES["flux"](), strategy=df.TwoBatch(), strict=True), PIPELINES["flux"]()
    torch.testing.assert_close(images("flux", pipe), images("flux", plain), rtol=1e-4, atol=1e-5)
    given = {"image": torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), "strength": 0.7, "num_inference_steps": 4}
    other = again(pipe)
    torch.testing.assert_close(images("flux", other, **given), images("flux", again(plain), **given), rtol=1e-4, atol=1e-5)
    assert df.stats(other).split_calls == df.stats(pipe).split_calls > NUM_STEPS
    with pytest.raises(errors.OptionError, match="optimized already.\n  where    transformer\n"):
        df.optimize(other)
    df.restore(other)
    assert "forward" not in vars(pipe.transformer)
    with pytest.raises(errors.OptionError, match="was not given to df.optimize"):
        df.restore(pipe)


def test_a_module_of_a_pipeline_says_what_it_counted():
    pipe = df.optimize(PIPELINES["sdxl"](), strategy=df.TwoBatch(), strict=True)
    images("sdxl", pipe)
    # UNet and ControlNet are one graph, which is the pipeline's
    assert df.stats(pipe).split_calls == NUM_STEPS and df.stats(pipe.unet).calls == df.stats(pipe.controlnet).calls == 0
    with pytest.raises(errors.OptionError, match="was replaced since df.optimize.\n  why      .*the pipeline"):
        df.restore(pipe.unet)
    df.restore(pipe)
    assert not {"forward", "_dynaflow_optimized"} & (vars(pipe.unet).keys() | vars(pipe).keys())


def test_rejects_what_is_no_pipeline():
    with pytest.raises(errors.OptionError, match="DDPMScheduler is nothing that df.optimize knows"):
        df.optimize(DDPMScheduler())


def test_blocks_compiled_by_diffusers_itself(counted):
    """`compile_repeated_blocks` takes our backend."""
    pipe = PIPELINES["flux"]()
    pipe.transformer.compile_repeated_blocks(backend="dynaflow", dynamic=True, options={"strategy": "two_batch"})
    torch.testing.assert_close(images("flux", pipe), images("flux", PIPELINES["flux"]()), rtol=1e-4, atol=1e-5)
    assert counted().split_calls == counted().calls == 3 * NUM_STEPS


def test_lora_of_a_pipeline():
    from peft import LoraConfig

    def with_lora():
        pipe = PIPELINES["sd3"]()
        torch.manual_seed(2)
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "add_q_proj"], init_lora_weights=False))
        return pipe

    pipe, plain = df.optimize(with_lora(), strategy=df.TwoBatch(), strict=True), with_lora()
    assert not torch.equal(images("sd3", plain), images("sd3", PIPELINES["sd3"]()))
    torch.testing.assert_close(images("sd3", pipe), images("sd3", plain), rtol=1e-4, atol=1e-5)
    assert df.stats(pipe).split_calls == NUM_STEPS


def test_other_pipelines_with_a_unet():
    def make():
        torch.manual_seed(0)
        unet = UNet2DModel(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(4, 8), norm_num_groups=4,
                           down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
        pipe = DDPMPipeline(unet.eval(), DDPMScheduler(num_train_timesteps=10))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def drawn(pipe):
        made = pipe(batch_size=2, num_inference_steps=3, output_type="np", generator=torch.Generator().manual_seed(1)).images
        return torch.from_numpy(made)

    pipe = df.optimize(make(), strategy=df.TwoBatch(), strict=True)
    torch.testing.assert_close(drawn(pipe), drawn(make()), rtol=1e-4, atol=1e-5)
    assert df.stats(pipe).split_calls == 3


def test_rejects_a_pipeline_without_a_denoiser():
    from diffusers import DiffusionPipeline

    class Decoding(DiffusionPipeline):
        def __init__(self, vae):
            super().__init__()
            self.register_modules(vae=vae)

    with pytest.raises(errors.OptionError, match="no denoiser in this Decoding"):
        df.optimize(Decoding(PIPELINES["sd3"]().vae))
