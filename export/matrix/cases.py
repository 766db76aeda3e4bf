"""What is tried: each with a name, what to write into its folder, and the words after `convoy export`.

Knows the lists. What the files hold is in `made`; what becomes of a case is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.export.matrix.made import arrays, checkpoints, onnx_files, originals, pictures
from convoy.export.matrix.made.originals import NETWORKS, USUAL, Shape

# What a user would say of images that are not scaled in any other way, 32 pixels high and wide.
_SEEN = ("--preprocess", "unit", "--input", "3x32x32")
Prepare = Callable[[Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """`prepare` writes into a folder what the command needs, and gives its words. `group` is the page's heading.

    It may write `originals.TRUTH`, too, which the bundle is held against then.
    """

    group: str
    what: str
    prepare: Prepare

    @property
    def name(self) -> str:
        return f"{self.group}: {self.what}"


def all_cases() -> tuple[Case, ...]:
    """In the order of the page; the quick ones of each group first."""
    return (
        *(_own(name) for name in _OWN),
        *(Case("Networks of one's own", what, prepare) for what, prepare in _OWN_OTHERWISE.items()),
        *(Case("Checkpoints from elsewhere", what, prepare) for what, prepare in _CHECKPOINTS.items()),
        *(Case("Free height and width", what, prepare) for what, prepare in _FREE_SIZES.items()),
        *(Case("ONNX files", what, prepare) for what, prepare in _ONNX.items()),
        *(Case("Several inputs and outputs", what, prepare) for what, prepare in _SEVERAL.items()),
        *(Case("Tasks and precisions", what, prepare) for what, prepare in _TASKS.items()),
        *(Case("Data and preprocessing", what, prepare) for what, prepare in _DATA.items()),
        *(Case("Odd sources", what, prepare) for what, prepare in _ODD.items()),
        *(Case("torchvision", name, _registry("torchvision", name)) for name in _TORCHVISION),
        *(Case("timm", name, _registry("timm", name)) for name in _TIMM),
    )


# --- what several of them need


def _with_weights(folder: Path, factory: str, shape: Shape = USUAL, mean: float = 0, std: float = 1) -> tuple[str, ...]:
    """Source and weights of a network whose own answers are kept."""
    originals.write_weights(factory, folder, shape, mean, std)
    return f"{NETWORKS}:{factory}", "--weights", f"{factory}.pth"


def _untrained(factory: str, *words: str) -> Prepare:
    def prepare(folder: Path) -> Sequence[str]:
        originals.write_networks(folder)
        return (f"{NETWORKS}:{factory}", *(words or (*_SEEN, "--random-weights")))

    return prepare


def _registry(kind: str, name: str) -> Prepare:
    return lambda folder: (f"{kind}:{name}", "--random-weights")


# --- networks of one's own

_OWN = (
    *("plain", "residual", "bottleneck", "dense", "depthwise", "inverted_residual", "squeeze_and_excitation"),
    *("inception", "dilated", "channel_shuffle", "transposed", "pixel_shuffle", "u_net", "resized_inside", "pools"),
    *("maximum_over_the_map", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "weight_norm"),
    *("activations", "dropout", "softmax_at_the_end", "log_softmax_at_the_end", "sigmoid_at_the_end", "one_output"),
    *("self_attention", "vision_transformer", "mixer", "recurrent_over_columns", "bilinear_pooling", "unfolded"),
    *("branch_on_the_shape", "flipped_views", "spectrum", "lazy"),
)


def _own(name: str) -> Case:
    return Case("Networks of one's own", name, lambda folder: (*_with_weights(folder, name), *_SEEN))


_OWN_OTHERWISE: dict[str, Prepare] = {
    "grey": lambda folder: (
        *_with_weights(folder, "grey", (32, 32, 1)),
        *("--preprocess", "unit", "--input", "1x32x32"),
    ),
    "oblong": lambda folder: (
        *_with_weights(folder, "oblong", (24, 40, 3)),
        *("--preprocess", "unit", "--input", "3x24x40"),
    ),
    "length_of_the_batch": _untrained("length_of_the_batch"),
    "branch_on_the_values": _untrained("branch_on_the_values"),
    "eigenvalues": _untrained("eigenvalues"),
    "feature_map": _untrained("feature_map"),
}


# --- checkpoints


def _checkpoint(name: str, *words: str) -> Prepare:
    return lambda folder: (
        f"{NETWORKS}:residual",
        *("--weights", checkpoints.write(name, folder)),
        *(*_SEEN, *words),
    )


_CHECKPOINTS: dict[str, Prepare] = {
    "a bare state_dict": _checkpoint("state_dict"),
    "safetensors": _checkpoint("safetensors"),
    "FP16 in safetensors": _checkpoint("half_safetensors"),
    "torch's format before 1.6": _checkpoint("old_format"),
    "{'net': ...}": _checkpoint("net"),
    "{'state_dict': ...}": _checkpoint("state_dict_inside"),
    "{'model': ..., 'args': Namespace}": _checkpoint("namespace"),
    "a number of NumPy's beside the weights": _checkpoint("numpys_numbers"),
    "'model' and 'model_ema'": _checkpoint("average_beside", "--weights-key", "model_ema"),
    "an entry that is not there": _checkpoint("average_beside", "--weights-key", "best"),
    "module. of DataParallel": _checkpoint("data_parallel"),
    "_orig_mod. of torch.compile": _checkpoint("compiled"),
    "module._orig_mod.": _checkpoint("compiled_in_parallel"),
    "any single prefix": _checkpoint("any_prefix"),
    "Lightning's model. beside a loss of its own": _checkpoint("lightning"),
    "AveragedModel": _checkpoint("averaged_model"),
    "pruning masks": _checkpoint("pruned"),
    "no num_batches_tracked": _checkpoint("no_counters"),
    "a network that was saved whole": _checkpoint("whole_network"),
    "student. and teacher.": _checkpoint("two_networks"),
    "a head for other classes": _checkpoint("other_classes"),
    "half of the tensors": _checkpoint("half_of_it"),
    "no weights": _checkpoint("no_weights"),
    "TorchScript": _checkpoint("torchscript"),
    "a file that was cut off": _checkpoint("cut_off"),
}


# --- ONNX files


def _onnx(name: str, *words: str) -> Prepare:
    def prepare(folder: Path) -> Sequence[str]:
        onnx_files.write(name, folder / f"{name}.onnx")
        return (f"{name}.onnx", *words)

    return prepare


def _old_opset(folder: Path) -> Sequence[str]:
    onnx_files.write("free_batch", folder / "opset11.onnx", opset=11)
    return ("opset11.onnx",)


def _weights_beside(folder: Path) -> Sequence[str]:
    onnx_files.write_beside("free_batch", folder / "large.onnx")
    return ("large.onnx",)


def _weights_lost(folder: Path) -> Sequence[str]:
    words = _weights_beside(folder)
    (folder / "large.onnx.data").unlink()
    return words


def _cut_off(folder: Path) -> Sequence[str]:
    onnx_files.write("free_batch", folder / "short.onnx")
    (folder / "short.onnx").write_bytes((folder / "short.onnx").read_bytes()[:200])
    return ("short.onnx",)


_UNIT = ("--preprocess", "unit")
_ONNX: dict[str, Prepare] = {
    "a free batch": _onnx("free_batch"),
    "a free batch, for pictures": _onnx("free_batch", *_UNIT),
    "a batch of 1": _onnx("batch_of_one"),
    "a batch of 1, for pictures": _onnx("batch_of_one", *_UNIT),
    "a batch of 1 that cannot be another": _onnx("mean_over_the_batch"),
    "a batch of 4": _onnx("batch_of_four"),
    "a batch of 4, for pictures": _onnx("batch_of_four", *_UNIT),
    "channels last, for pictures": _onnx("channels_last", *_UNIT),
    "a softmax at the end, for pictures": _onnx("softmax", *_UNIT),
    "opset 11": _old_opset,
    "weights in a file beside it": _weights_beside,
    "weights beside it that are lost": _weights_lost,
    "bytes": _onnx("bytes"),
    "FP16 tensors": _onnx("half"),
    "BF16 tensors": _onnx("bfloat16"),
    "BF16 tensors, for pictures": _onnx("bfloat16", *_SEEN),
    "FP64 tensors": _onnx("double"),
    "numbers of words": _onnx("ids"),
    "strings": _onnx("strings"),
    "If": _onnx("branches"),
    "QDQ inside already": _onnx("quantised"),
    "answers of chance": _onnx("random"),
    "an operator of another's": _onnx("foreign_operator"),
    "a sequence for output": _onnx("sequence"),
    "a feature map, for pictures": _onnx("free_sizes_map", *_UNIT, "--input", "3x32x32"),
    "a file that was cut off": _cut_off,
}

_FREE_SIZES: dict[str, Prepare] = {
    "an ONNX file": _onnx("free_sizes"),
    "an ONNX file with a feature map": _onnx("free_sizes_map"),
    "an ONNX file that is told one size": _onnx("free_sizes", "--input", "3x48x64"),
    "an ONNX file that is told where to begin": _onnx("free_sizes", "--input", "3x48?x64?"),
    "an ONNX file that runs at hardly any size": _onnx("free_sizes_flattened"),
    "an ONNX file, for pictures of one size": _onnx("free_sizes", *_UNIT, "--input", "3x32x32"),
    "an ONNX file, for pictures and other sizes": _onnx("free_sizes", *_UNIT, "--input", "3x32?x32?"),
    "a network of torch's": lambda folder: (
        *_with_weights(folder, "any_size"),
        *("--preprocess", "unit", "--input", "3x32?x32?"),
    ),
    "a network of torch's that flattens its map": lambda folder: (
        *_with_weights(folder, "plain"),
        *("--preprocess", "unit", "--input", "3x32?x32?"),
    ),
}

_SEVERAL: dict[str, Prepare] = {
    "an ONNX file with two inputs": _onnx("two_inputs"),
    "an ONNX file with two inputs, for pictures": _onnx("two_inputs", *_SEEN),
    "an ONNX file with two outputs": _onnx("two_outputs"),
    "an ONNX file with two outputs, for pictures": _onnx("two_outputs", *_UNIT),
    "a factory whose network has two inputs": _untrained("two_inputs"),
    "a factory whose network has two outputs": _untrained("two_outputs"),
    "a factory whose network answers with a dict": _untrained("dictionary"),
}


# --- data and preprocessing


def _colours(folders: tuple[str, ...], labels: str, *words: str, **files: str) -> Prepare:
    def prepare(folder: Path) -> Sequence[str]:
        pictures.write(folder / "photos", folders)
        originals.write_networks(folder)
        (folder / "labels.txt").write_text(labels.replace(" ", "\n") + "\n")
        for stem, text in files.items():
            (folder / f"{stem}.json").write_text(text)
        source = (f"{NETWORKS}:colours", "--labels", "labels.txt", "--evaluate", "photos")
        return (*source, *(words or ("--preprocess", "unit", "--input", "3x32x32")))

    return prepare


def _said(*words: str, mean: float = 0, std: float = 1) -> Prepare:
    """A network of which single steps of the preprocessing are said."""
    return lambda folder: (*_with_weights(folder, "plain", mean=mean, std=std), *words)


def _by_file(**changes: object) -> Prepare:
    whole = {"height": 32, "width": 32, "channels": 3, "resize_mode": "shorter_side", "resize_px": 36}
    whole |= {"interpolation": "bilinear", "antialias": True, "mean": [0.5] * 3, "std": [0.25] * 3}

    def prepare(folder: Path) -> Sequence[str]:
        (folder / "seen.json").write_text(json.dumps(whole | changes))
        return (*_with_weights(folder, "plain", mean=0.5, std=0.25), "--preprocess", "seen.json")

    return prepare


_FIVE = "red green blue yellow white"
_DATA: dict[str, Prepare] = {
    "pictures of all classes but two": _colours(pictures.COLOURS, _FIVE),
    "labels in another order than the folders": _colours(("green", "red", "blue"), "green red blue yellow white"),
    "folders of other names": _colours(("n01", "n02", "n03"), _FIVE),
    "folders of other names, with --class-map": _colours(
        ("n01", "n02", "n03"),
        _FIVE,
        *("--class-map", "names.json", "--preprocess", "unit", "--input", "3x32x32"),
        names=json.dumps({"n01": "red", "n02": 1, "n03": "blue"}),
    ),
    "labels that are shifted by one": _colours(pictures.COLOURS, "white red green blue yellow"),
    "labels of another number": _colours(pictures.COLOURS, "red green blue"),
    "--labels imagenet": lambda folder: ("torchvision:squeezenet1_1", "--random-weights", "--labels", "imagenet"),
    "--labels imagenet for five outputs": lambda folder: (
        *_with_weights(folder, "plain"),
        *_SEEN,
        "--labels",
        "imagenet",
    ),
    "no preprocessing": _said("--input", "3x32x32"),
    "--mean, --std, --resize, --crop, --interpolation": _said(
        *("--mean", "0.5", "--std", "0.25", "--resize", "36", "--crop", "32", "--interpolation", "bicubic"),
        mean=0.5,
        std=0.25,
    ),
    "--mean and --std beside --preprocess": _said(*_SEEN, "--mean", "0.4,0.4,0.4", "--std", "0.2", mean=0.4, std=0.2),
    "--mean alone": _said("--mean", "0.5"),
    "--crop that is larger than --resize": _said(
        *("--mean", "0.5", "--std", "0.25", "--resize", "30", "--crop", "32", "--interpolation", "bilinear")
    ),
    "--preprocess FILE": _by_file(),
    "--preprocess FILE with mistakes": _by_file(interpolation="cubic", mean=[0.5], size=32),
}


# --- tasks and precisions

_ALL = ("--precisions", "fp32,fp16,int8")
# Weights by chance lose what chance decides: what is asked here is whether each file can be made and proved.
_BY_CHANCE = ("--random-weights", "--force")
_HEAD = {"boxes": "places", "scores": "found", "box_form": "cxcywh", "box_unit": "fractions"}


def _task(factory: str, *words: str) -> Prepare:
    """A network of chance with pictures to calibrate on, all in one folder."""

    def prepare(folder: Path) -> Sequence[str]:
        pictures.write(folder / "photos", ("red",))
        originals.write_networks(folder)
        (folder / "head.json").write_text(json.dumps(_HEAD))
        data = "photos/red"
        return (f"{NETWORKS}:{factory}", *_SEEN, "--calibrate", data, "--evaluate", data, *_BY_CHANCE, *words)

    return prepare


def _arrays(factory: str, write: Callable[[Path], None], *words: str) -> Prepare:
    def prepare(folder: Path) -> Sequence[str]:
        write(folder / "samples.npz")
        originals.write_networks(folder)
        (folder / "scores.py").write_text(arrays.SCORES)
        data = ("--calibrate", "samples.npz", "--evaluate", "samples.npz")
        return (f"{NETWORKS}:{factory}", *data, *_BY_CHANCE, *words)

    return prepare


_TASKS: dict[str, Prepare] = {
    "classes, in all precisions": _colours(
        pictures.COLOURS,
        _FIVE,
        *("--preprocess", "unit", "--input", "3x32x32", "--calibrate", "photos", *_ALL),
    ),
    "a flat folder without classes, in all precisions": _task("plain", *_ALL),
    "--task multilabel": _task("plain", "--task", "multilabel"),
    "--task segment, in all precisions": _task("maps", "--task", "segment", *_ALL),
    "--task detect with --detection": _task(
        "detector", *("--task", "detect", "--detection", "head.json", "--precisions", "fp32,fp16")
    ),
    "--task none, in all precisions": _task("dictionary", "--task", "none", *_ALL),
    "one sample at a time, in all precisions": _task("one_by_one", *_ALL),
    "a signal": _untrained("signal", "--input", "2x64", "--random-weights"),
    "a signal with .npz and classes, in all precisions": _arrays(
        "signal", arrays.write_signals, *("--task", "classify"), *_ALL
    ),
    "a signal with .npz and --metric": _arrays(
        "signal", arrays.write_targets, *("--metric", "scores.py:close", "--precisions", "fp32,fp16")
    ),
    "two inputs with .npz, in all precisions": _arrays("two_inputs", arrays.write_pairs, *_ALL),
    "torchvision's LR-ASPP": lambda folder: (
        *("torchvision:lraspp_mobilenet_v3_large", "--input", "3x64x64"),
        "--random-weights",
    ),
    "torchvision's SSDlite": lambda folder: ("torchvision:ssdlite320_mobilenet_v3_large", "--random-weights"),
    "torchvision's Faster R-CNN": lambda folder: ("torchvision:fasterrcnn_resnet50_fpn", "--random-weights"),
}


# --- odd sources


def _program(folder: Path) -> Sequence[str]:
    originals.write_program(folder / "residual.pt2")
    return ("residual.pt2", *_SEEN)


def _without_factory(folder: Path) -> Sequence[str]:
    originals.write_networks(folder)
    return (NETWORKS, *_SEEN)


def _reduced(factory: str) -> Prepare:
    def prepare(folder: Path) -> Sequence[str]:
        originals.write_reduced_weights(factory, folder)
        return (f"{NETWORKS}:{factory}", "--weights", f"{factory}.pth", *_SEEN)

    return prepare


_ODD: dict[str, Prepare] = {
    "a network in FP16 (.half())": _reduced("half"),
    "a network in BF16": _reduced("bfloat16"),
    "a module that puts another into training mode": _untrained("trains_itself"),
    "TorchScript from a factory": _untrained("scripted"),
    "no module from a factory": _untrained("no_module"),
    "a factory that fails": _untrained("fails"),
    "a factory that is not there": _untrained("nosuch"),
    "a factory with random weights, not said so": _untrained("plain", *_SEEN),
    "a file without its factory": _without_factory,
    "a file that is not there": lambda folder: ("other.py:net", *_SEEN),
    "a program of torch.export, trusted": lambda folder: (*_program(folder), "--trust"),
    "a program of torch.export": _program,
    "torchvision:nosuch": lambda folder: ("torchvision:nosuch", "--random-weights"),
    "timm:nosuch": lambda folder: ("timm:nosuch", "--random-weights"),
    "torchvision:resnet18 without weights": lambda folder: ("torchvision:resnet18",),
    "a word that is no source": lambda folder: ("resnet18",),
}


# --- what others publish, with random weights

_TORCHVISION = (
    *("squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v3_small", "resnet18", "efficientnet_b0", "swin_t"),
    *("mnasnet0_5", "regnet_y_400mf", "mobilenet_v2", "googlenet", "densenet121", "convnext_tiny"),
)
_TIMM = (
    *("resnet10t", "lcnet_050", "mobilenetv4_conv_small", "tinynet_e", "ghostnet_100", "repvgg_a0", "convnext_atto"),
    *("mobilevit_xxs", "deit_tiny_patch16_224", "levit_128s", "edgenext_xx_small"),
    *("efficientvit_b0", "fastvit_t8", "rexnet_100", "hardcorenas_a", "fbnetc_100", "tf_efficientnetv2_b0"),
    *(
        "xcit_nano_12_p16_224",
        "coat_lite_tiny",
        "poolformer_s12",
        "mixnet_s",
        "dla34",
        "selecsls42b",
        "vit_tiny_patch16_224",
    ),
)
