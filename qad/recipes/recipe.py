"""Recipes: short YAML files, validated strictly before anything runs.

A key that is not known names its nearest neighbour; a value that does not fit says what is allowed. Defaults are
those of the method (arXiv 2601.20088): forward KL at temperature 1 over all tokens, AdamW (.9, .95), no weight decay,
gradient clipping 1.0, constant learning rate.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qad.errors import UsageError
from qad.text.data import Data, Positive


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Format = Literal["NVFP4", "W4A16_NVFP4", "FP8"]


class Quantize(_Strict):
    """format: NVFP4 (W4A4), W4A16_NVFP4 or FP8 (one scale per tensor). formats: glob -> format of the modules that get
    another one, the first match decides (MIXED_PRECISION). include / exclude: globs on full module names; the output head
    is quantized only where include lists it by its full name, such as ["*", lm_head].

    scales of 4-bit weights: `dynamic` follow the weights as they train; `mse` and `four_over_six` are found once in calibration
    and frozen (see qad.numerics.scale_search).
    kv_cache: off, or FP8 with scales by the policy calibrated, at_least_one or cast (see qad.arms.kv_cache).
    """

    format: Format = "NVFP4"
    formats: dict[str, Format] = {}
    include: list[str] = ["*"]
    exclude: list[str] = []
    scales: Literal["dynamic", "mse", "four_over_six"] = "dynamic"
    kv_cache: Literal["off", "calibrated", "at_least_one", "cast"] = "off"


class Calibrate(_Strict):
    """samples sequences of seq_len tokens; headroom multiplies the calibrated amax of activations: above 1,
    inputs larger than any seen in calibration find room, and small ones lose resolution."""

    data: Data
    samples: Positive = 512
    seq_len: Positive = 512
    headroom: Annotated[float, Field(gt=0)] = 1.0


Method = Literal["qad", "qat"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Train(_Strict):
    """Method and loss.
    method: qad (learn the teacher's distribution), qat (cross-entropy on the text), or a list of both.
    loss: qad's, forward_kl | reverse_kl | jsd | mse, at `temperature`. teacher: a larger model of the same
    tokenizer; None is the BF16 original. teacher_cache: keep the teacher's top K log-probabilities on disk.

    Amount. tokens: total, over all epochs; each step takes batch_size sequences of seq_len tokens, micro_batch_size
    at a time. loss_on: all real tokens, or only what the assistant says in conversations, its end-of-turn included.

    Update. trainable: all, linears (the quantized ones) or globs on parameter names. lr_scale: glob -> factor on lr.
    optimizer: adamw, or adamw8bit (moments in 8 bits, needs torchao). weight_only_steps: so many first steps leave
    activations unquantized. activation_checkpointing: recompute instead of keeping. chunk: tokens whose logits exist
    at one time.

    Watch. validate_every: steps between validations; validation_tokens of the validation split choose the best
    checkpoint; after `patience` validations without a better one training stops. save_every: steps between resumable
    states.

    seed: of the order of the training text; None is the recipe's. Runs that differ in it alone are seeds of one recipe, which
    `qad compare` takes together.
    """

    method: Method | list[Method] = "qad"
    loss: Literal["forward_kl", "reverse_kl", "jsd", "mse"] = "forward_kl"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    teacher: str | None = None
    teacher_cache: Positive | None = None
    data: Data
    validation_data: Data | None = None
    tokens: Positive
    seq_len: Positive = 512
    batch_size: Positive = 4
    micro_batch_size: Positive | None = None
    epochs: Positive = 1
    loss_on: Literal["all", "assistant"] = "all"
    trainable: Literal["all", "linears"] | list[str] = "all"
    lr: Annotated[float, Field(gt=0)] = 1e-5
    lr_scale: dict[str, Annotated[float, Field(gt=0)]] = {}
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    clip: Annotated[float, Field(gt=0)] = 1.0
    weight_only_steps: Annotated[int, Field(ge=0)] = 0
    activation_checkpointing: bool = False
    chunk: Positive = 512
    validate_every: Positive = 10
    validation_tokens: Positive = 4096
    patience: Positive | None = None
    save_every: Positive = 10
    seed: Annotated[int, Field(ge=0)] | None = None

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
                f"tokens {self.tokens} is less than one step (batch_size {self.batch_size} x seq_len): give more tokens"
            )
        if self.epochs > self.steps:
            raise ValueError(
                f"epochs {self.epochs} is more than the {self.steps} steps that tokens {self.tokens} allows"
            )
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
    layout: Literal["modelopt", "compressed-tensors"] = "modelopt"
    shard_size: Positive = 5_000_000_000


class Fidelity(_Strict):
    """Documents of the test split, each cut at seq_len, until `tokens` are reached. per_layer: the distance of hidden states
    too. new_tokens: so many tokens are written after the first prompt_tokens of each document, greedily by every arm (where do
    they first differ?) and freely by BF16 (how do the others like it?); None leaves that out.
    """

    data: Data
    tokens: Positive = 8192
    seq_len: Positive = 512
    per_layer: bool = False
    new_tokens: Positive | None = None
    prompt_tokens: Positive = 32


class Accuracy(_Strict):
    """tasks: shipped (qad_*) or any lm-eval task.

    suite: in place of tasks a shipped one or a YAML file (see harness.accuracy.suite), suite_data the folder of its data
    files. limit: items per task, for smoke runs. n_shot: None: the task's own. think_end: what ends a
    reasoning model's thinking, such as </think>; a suite's own counts where it has one.
    """

    tasks: list[str] = []
    suite: str | None = None
    suite_data: str | None = None
    limit: Positive | None = None
    n_shot: Annotated[int, Field(ge=0)] | None = None
    batch_size: Positive = 16
    think_end: Annotated[str, Field(min_length=1)] | None = None

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
    batch: Positive = 1
    input_tokens: Positive = 256
    output_tokens: Positive = 32
    repeats: Positive = 3


class Measure(_Strict):
    """engine: what serves the arms where memory and speed are measured. auto: vllm where it computes on a GPU, else none
    (transformers, in this process). On a CPU vLLM emulates NVFP4, so there it has to be asked for.
    noise_floor: measure BF16 and PTQ a second time under another batch size, seed and attention kernel."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    memory: bool = True
    noise_floor: bool = False
    fidelity: Fidelity | None = None
    accuracy: Accuracy | None = None
    throughput: Throughput | None = None


class Track(_Strict):
    """to: the library that gets a copy of the metrics; it has to be installed. project: the name there."""

    to: Literal["trackio", "wandb"]
    project: str = "nvfp4-qad"


class Recipe(_Strict):
    """One run, whole. dtype: compute dtype of teacher and student; auto is BF16 where the hardware multiplies BF16
    natively, else FP32. calibrate: may be left out where neither activations nor the KV cache need scales. train: where there is
    none, a run makes, exports and measures PTQ."""

    model: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0)] = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantize: Quantize = Quantize()
    calibrate: Calibrate | None = None
    train: Train | None = None
    export: Export = Export()
    measure: Measure = Measure()
    track: Track | None = None

    @model_validator(mode="after")
    def _scales(self) -> Recipe:
        weights_only = {self.quantize.format, *self.quantize.formats.values()} == {"W4A16_NVFP4"}
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
    def training(self) -> Train:
        """`train`. Raises UsageError where the recipe has none."""
        if self.train is None:
            raise UsageError("the recipe has no train: give train.data and train.tokens, or use `qad ptq` or `qad run`")
        return self.train

    def section(self, name: str) -> dict[str, Any]:
        """One section as plain JSON types, for a stage's config."""
        value: dict[str, Any] = getattr(self, name).model_dump(mode="json")
        return value
