"""Recipes: short YAML files, validated strictly before anything runs.

A key that is not known names its nearest neighbour; a value that does not fit says what is allowed. Defaults are
those of the method (arXiv 2601.20088): forward KL at temperature 1 over all tokens, AdamW (.9, .95), no weight decay,
gradient clipping 1.0, constant learning rate. What chose each default stands in docs/concepts/studies.md.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from qad.errors import UsageError
from qad.numerics.formats import KV_FORMATS, quantizes_activations
from qad.recipes.quantize import PLAIN, STRICT, Quantize
from qad.text.data import Data, Positive


class _Strict(BaseModel):
    model_config = STRICT


Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every generator takes


class Calibrate(_Strict):
    """Text on which scales of activations, and of K and V, are found."""

    data: Data
    """where the text comes from"""
    samples: Positive = 512
    """windows (convention; published are about 1,000)"""
    seq_len: Positive = 512
    """tokens of a window"""
    headroom: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """factor on the largest input seen: above 1, larger inputs find room and small ones lose resolution (1: convention)"""


Method = Literal["qad", "qat"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Train(_Strict):
    """What the student learns, from how much text, and how it moves."""

    method: Method | list[Method] = "qad"
    """qad (learn the teacher's distribution; published, studies: skill), qat (cross-entropy on the text), or a list of both"""
    loss: Literal["forward_kl", "reverse_kl", "jsd", "mse"] = "forward_kl"
    """of qad (forward_kl: published; studies: losses)"""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """of both distributions in the loss (1: published)"""
    teacher: str | None = None
    """a larger model of the same tokenizer; none is the BF16 original (published)"""
    teacher_cache: Positive | None = None
    """keep the teacher's likeliest K ids of every token on disk, for epochs and repeated runs"""
    data: Data
    """where the text comes from"""
    validation_data: Data | None = None
    """none is the validation split of data"""
    tokens: Positive
    """in all, over all epochs"""
    seq_len: Positive = 512
    """tokens of a window"""
    batch_size: Positive = 4
    """windows of a step (convention)"""
    micro_batch_size: Positive | None = None
    """windows at a time; none is batch_size"""
    epochs: Positive = 1
    """times that each window is seen"""
    loss_on: Literal["all", "assistant"] = "all"
    """all real tokens (published), or what the assistant says in conversations, its end-of-turn included"""
    trainable: Literal["all", "linears"] | list[str] = "all"
    """all parameters of the language model (published), the quantized linears, or globs on parameter names"""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """learning rate of AdamW, without weight decay (published: 1e-5 after RL, 1e-6 after SFT; studies: rates)"""
    lr_scale: dict[str, Annotated[float, Field(gt=0)]] = {}
    """glob on parameter names -> factor on lr; the first match decides"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the learning rate after warm-up: constant (published), or down to 0"""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """steps of linear warm-up (0: published; small models of ours take a tenth)"""
    optimizer: Literal["adamw", "adamw8bit", "adamw_offloaded"] = "adamw"
    """adamw8bit keeps its moments in 8 bits (needs torchao), adamw_offloaded in the host's memory, with the bits of adamw"""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """decay of AdamW's moments (published)"""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """largest norm of a step's gradient (published)"""
    weight_only_steps: Annotated[int, Field(ge=0)] = 0
    """so many first steps leave activations unquantized"""
    activation_checkpointing: bool | None = None
    """compute activations again in backward instead of keeping them; none does on a GPU that would be too small otherwise"""
    attention: Literal["auto", "sdpa", "flash", "flex"] = "auto"
    """of packed windows: sdpa with a dense mask, or on a GPU without one (flex, flash); auto is sdpa on a CPU, flex on a GPU"""
    chunk: Positive | None = None
    """tokens whose logits exist at one time; none is 128 on a CPU, on a GPU what 1 GB of them hold in BF16"""
    validate_every: Positive = 10
    """steps between validations"""
    validation_tokens: Positive = 4096
    """of the validation split; their loss chooses the best checkpoint"""
    patience: Positive | None = None
    """stop after so many validations without a better one"""
    save_every: Positive = 10
    """steps between states that a killed training resumes from"""
    save_minutes: Annotated[float, Field(gt=0)] | None = None
    """minutes between states, in place of save_every; what is saved when decides nothing of the result"""
    seed: Seed | None = None
    """of the order of the training text; none is the recipe's. Runs that differ in it alone are seeds of one recipe"""

    @property
    def methods(self) -> list[Method]:
        """In the order they run."""
        return self.method if isinstance(self.method, list) else [self.method]

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def windows(self) -> int:
        """Windows of seq_len tokens that one epoch sees; the last epoch may end early."""
        return -(-self.steps // self.epochs) * self.batch_size

    @property
    def validation_windows(self) -> int:
        return max(1, self.validation_tokens // self.seq_len)

    @property
    def tokens_used(self) -> int:
        """Tokens of whole steps; at most one step less than asked for."""
        return self.steps * self.tokens_per_step

    @model_validator(mode="after")
    def _whole(self) -> Train:
        if self.steps < 1:
            raise ValueError(
                f"tokens {self.tokens:,} is less than one step of {self.tokens_per_step:,} "
                f"(batch_size {self.batch_size} x seq_len {self.seq_len:,}): give more tokens, or lower one of the two"
            )
        if self.epochs > self.steps:
            raise ValueError(f"epochs {self.epochs} is more than the {self.steps} steps that tokens {self.tokens} allows")
        if self.warmup_steps >= self.steps > 1:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves none of the {self.steps} steps at the full rate")
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"method {self.method} names a method twice or none")
        if "qad" not in self.methods and (self.loss, self.temperature, self.teacher_cache) != ("forward_kl", 1.0, None):
            raise ValueError("loss, temperature and teacher_cache are those of method qad; qat is cross-entropy")
        if self.teacher_cache and (self.loss, self.temperature) != ("forward_kl", 1.0):
            raise ValueError("teacher_cache serves forward_kl at temperature 1 only")
        if self.loss == "mse" and self.temperature != 1.0:
            raise ValueError("temperature softens distributions; mse compares logits")
        return self


class Export(_Strict):
    """How arms become checkpoints."""

    layout: Literal["modelopt", "compressed-tensors"] = "modelopt"
    """modelopt for TensorRT-LLM, vLLM and SGLang; compressed-tensors for vLLM and transformers"""
    shard_size: Positive = 5_000_000_000
    """bytes of the largest weight file"""


class Fidelity(_Strict):
    """Distance from the BF16 original on documents of the test split."""

    data: Data
    """where the text comes from"""
    tokens: Positive = 8192
    """documents are taken until there are so many"""
    seq_len: Positive = 512
    """tokens at which a document is cut"""
    per_layer: bool = False
    """also the distance of hidden states, layer by layer"""
    split: bool = False
    """also the distance of the weights alone and of the quantized inputs alone"""
    new_tokens: Positive | None = None
    """tokens that are written after each document's beginning, greedily by every arm and freely by BF16"""
    prompt_tokens: Positive = 32
    """tokens of that beginning"""


class Accuracy(_Strict):
    """Benchmarks: tasks or a suite."""

    tasks: list[str] = []
    """shipped (qad_*) or any lm-eval task"""
    suite: str | None = None
    """a shipped suite, or a YAML file (see harness/accuracy/suite.py)"""
    suite_data: str | None = None
    """folder of the suite's data files"""
    limit: Positive | None = None
    """items a task, for smoke runs"""
    n_shot: Annotated[int, Field(ge=0)] | None = None
    """examples in the prompt; none is the task's own"""
    batch_size: Positive = 16
    """prompts at a time"""
    think_end: Annotated[str, Field(min_length=1)] | None = None
    """what ends a reasoning model's thinking, such as </think>; a suite's own counts where it has one"""

    @model_validator(mode="after")
    def _one_source(self) -> Accuracy:
        if bool(self.tasks) == bool(self.suite):
            raise ValueError("give either tasks or a suite")
        if self.suite and self.n_shot is not None:
            raise ValueError("n_shot is the suite's: set it in its file")
        if self.suite_data and not self.suite:
            raise ValueError("suite_data is the folder of a suite's data files: give suite")
        return self


class Throughput(_Strict):
    """Speed of generation, in this process or by the engine that serves the arms."""

    batch: Positive = 1
    """sequences at once"""
    input_tokens: Positive = 256
    """tokens of a prompt"""
    output_tokens: Positive = 32
    """tokens written"""
    repeats: Positive = 3
    """runs of each arm, in turns"""


class Measure(_Strict):
    """What is measured of every arm."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """what serves the arms for memory and speed; auto is vllm where it computes on a GPU, else this process"""
    memory: bool = True
    """bytes of weights, cache and states, and what an engine reports"""
    noise_floor: bool = False
    """measure BF16 and PTQ again under another batch size, seed and attention kernel"""
    fidelity: Fidelity | None = None
    """distance from BF16 on text"""
    accuracy: Accuracy | None = None
    """benchmarks"""
    throughput: Throughput | None = None
    """speed of generation"""


class Track(_Strict):
    """A copy of the metrics for a tracker."""

    to: Literal["trackio", "wandb"]
    """the library, which has to be installed"""
    project: str = "nvfp4-qad"
    """the name there"""


class Recipe(_Strict):
    """One run, whole."""

    base: str | None = None
    """name or path of another recipe, whose keys count where this one gives none"""
    model: Annotated[str, Field(min_length=1)]
    """folder of the BF16 original, or its name on the hub"""
    seed: Seed = 0
    """of everything that is drawn"""
    template_time: datetime.datetime | None = None
    """what a chat template reads that asks for the time; none is the moment a run is made, which the run then keeps"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """compute dtype of teacher and student; auto is bfloat16 where the hardware multiplies it natively"""
    quantize: Quantize = Quantize()
    """what becomes 4-bit, and how"""
    calibrate: Calibrate | None = None
    """text for scales; left out where neither activations nor the KV cache need any"""
    train: Train | None = None
    """without it a run makes, exports and measures PTQ"""
    export: Export = Export()
    """how arms become checkpoints"""
    measure: Measure = Measure()
    """what is measured of every arm"""
    track: Track | None = None
    """a copy of the metrics for a tracker"""

    @model_validator(mode="after")
    def _scales(self) -> Recipe:
        if self.quantize.rounding != "nearest" and (self.quantize.scales == "dynamic" or self.calibrate is None):
            raise ValueError(
                f"quantize.rounding {self.quantize.rounding} decides codes beside frozen scales, on text: set "
                "quantize.scales to mse and give calibrate.data"
            )
        if self.quantize.search and (self.calibrate is None or self.quantize.formats):
            raise ValueError("quantize.search decides formats on text: give calibrate.data and leave quantize.formats out")
        if self.quantize.kv_cache != "off" and self.export.layout not in KV_FORMATS[self.quantize.kv_format].schemes:
            raise ValueError(
                f"quantize.kv_format {self.quantize.kv_format} has no words in the {self.export.layout} layout: set "
                "export.layout to modelopt"
            )
        if self.quantize.balance and self.calibrate is None:
            raise ValueError("quantize.balance measures channels on text: give calibrate.data")
        if self.quantize.balance and self.measure.fidelity and self.measure.fidelity.split:
            raise ValueError(
                "measure.fidelity.split gives the original's weights the arm's inputs, which after quantize.balance are those of "
                "other weights: leave one of the two out"
            )
        weights_only = not any(map(quantizes_activations, (self.quantize.format, *self.quantize.formats.values())))
        if self.calibrate is None and not (weights_only and self.quantize.kv_cache in ("off", "cast")):
            raise ValueError(
                "calibrate is missing: scales of activations, and of K and V, are found on text; give calibrate.data, or set "
                "quantize.format to W4A16_NVFP4, which quantizes weights alone"
            )
        return self

    @property
    def methods(self) -> list[Method]:
        """What arms are trained, in the order they run; [] without `train`."""
        return self.train.methods if self.train else []

    @property
    def quantized(self) -> list[str]:
        """What arms are quantized, in the order they are made."""
        return [*([PLAIN] if self.quantize.plain else []), "ptq", *self.methods]

    @property
    def training(self) -> Train:
        """`train`. Raises UsageError where the recipe has none."""
        if self.train is None:
            raise UsageError("the recipe has no train: give train.data and train.tokens, or use `qad ptq` or `qad run`")
        return self.train

    def section(self, name: str) -> dict[str, Any]:
        """One section as plain JSON types, for a stage's config."""
        value: dict[str, Any] = getattr(self, name).model_dump(mode="json")
        return value
