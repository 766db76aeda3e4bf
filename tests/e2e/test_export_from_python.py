"""`convoy.export()` from Python, the file that repeats an export, and the advice where images are prepared wrongly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import transforms

import convoy
from convoy.export.command import export_bundle
from convoy.export.config_file import EXPORT_FILE, read_options
from convoy.export.options import ExportOptions
from convoy.models.bundle import open_bundle
from convoy.models.errors import JobError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("measures_little", "forks_torch")]

# Tells bright images from dark ones, if their values are from 0 to 255.
NETWORK = """
import torch
from torch import nn

class Brightness(nn.Module):
    def __init__(self, level=128.0):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(level))

    def forward(self, images):
        bright = images.mean((1, 2, 3)) - self.level
        return torch.stack([bright, -bright], 1)
"""


class Brightness(nn.Module):
    """The same for values from 0 to 1."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = images.mean((1, 2, 3)) - 0.5
        return torch.stack([bright, -bright], 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for part in ("calibration", "test"):
        for label, least in (("bright", 150), ("dark", 0)):
            folder = root / part / label
            folder.mkdir(parents=True)
            for index in range(20):
                Image.fromarray(generator.integers(least, least + 100, (9, 11, 3), np.uint8)).save(
                    folder / f"{index}.png"
                )
    return root


def test_a_module_in_memory_becomes_a_bundle(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    result = convoy.export(
        Brightness(), preprocess=transform, data=data, store=tmp_path / "store", precisions="fp32", progress=False
    )
    assert (result.name, result.version, result.accuracy) == ("brightness", 1, 1.0)
    assert [variant.file for variant in result.variants] == ["fp32.onnx"]
    assert result.report.is_file()
    assert "fp32.onnx" in str(result)
    assert '<pre style="line-height: normal; font-family: monospace">' in result._repr_html_()
    bundle = open_bundle(result.folder)
    assert bundle.manifest.spec.labels == ("bright", "dark")
    repeat = read_options(result.folder / EXPORT_FILE)
    assert "source" not in repeat
    assert repeat["precisions"] == "fp32"
    assert capsys.readouterr().out == ""


def test_a_notebook_gets_the_same(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter runs a cell inside an event loop, and rich displays there what it prints."""
    transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    options = {"store": tmp_path / "store", "precisions": "fp32", "progress": False}

    async def cell() -> convoy.ExportResult:
        return convoy.export(Brightness(), preprocess=transform, data=data, **options)

    result = asyncio.run(cell())
    (fp32,) = result.variants
    assert fp32.builder is None or fp32.builder.asked, fp32.builder  # None: TensorRT for RTX is not installed
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "fp32.onnx" in str(result)
    assert "fp32.onnx" in result._repr_html_()


def test_the_users_module_and_input_stay_as_they_are(data: Path, tmp_path: Path) -> None:
    class Frozen(Brightness):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3).eval()

    module = Frozen().train()
    module.norm.eval()
    plain = transforms.Compose([transforms.ToTensor()])
    where = {"data": data, "store": tmp_path, "precisions": "fp32", "progress": False}
    result = convoy.export(module, preprocess=plain, input="3x6x7", **where)
    assert (module.training, module.norm.training) == (True, False)
    image = result.manifest.spec.image
    assert image is not None
    assert (image.height, image.width, image.resize_mode) == (6, 7, "exact")
    with pytest.raises(UsageError, match="does not resize images; add a Resize, or pass --input"):
        convoy.export(module, preprocess=plain, **where)
    no_crop = transforms.Compose([transforms.Resize(8), transforms.ToTensor()])
    with pytest.raises(UsageError, match=r"Resize\(8\) alone gives images of many sizes; add CenterCrop"):
        convoy.export(module, preprocess=no_crop, **where)


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model is a list; pass a torch.nn.Module"):
        convoy.export([], preprocess="imagenet")
    with pytest.raises(UsageError, match="pass --preprocess imagenet"):
        convoy.export(Brightness(), store=str(tmp_path))
    with pytest.raises(UsageError, match="unknown option 'preproces'; did you mean 'preprocess'"):
        convoy.export(Brightness(), preproces="imagenet")
    with pytest.raises(UsageError, match="there is no checkpoint at missing"):
        convoy.export("zoo:simple_cnn", weights="missing.pth", store=str(tmp_path))

    class Branches(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))

    with pytest.raises(JobError, match=r"torch.export cannot trace Branches .* pass 'file.py:factory'"):
        convoy.export(Branches(), preprocess="unit", input="3x8x8", store=tmp_path)


def test_a_wrong_preparation_is_refused_with_the_one_that_works(data: Path, tmp_path: Path) -> None:
    network = tmp_path / "networks.py"
    network.write_text(NETWORK)
    asked = ExportOptions(
        source=f"{network}:Brightness(level=128.0)",
        data=str(data),
        preprocess="unit",
        input="3x8x8",
        precisions="fp32",
        random_weights=False,
        store=tmp_path / "store",
    )
    with pytest.raises(JobError, match=r"with --preprocess raw: 100.00 % of 40 images are right"):
        export_bundle(asked)
    folder = export_bundle(ExportOptions(**{**_fields(asked), "preprocess": "raw"}))
    assert folder.parent.name == "Brightness"
    again = export_bundle(ExportOptions(**read_options(folder / EXPORT_FILE)))
    assert (again.parent, again.name) == (folder.parent, "2")
    assert open_bundle(again).manifest.spec == open_bundle(folder).manifest.spec


def _fields(options: ExportOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in ExportOptions.__dataclass_fields__}
