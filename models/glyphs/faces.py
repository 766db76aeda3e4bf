"""The free fonts that characters are drawn from: the package of each, and whether it is for training or testing.

All faces of a family are on one side, so no test face has a bold or slanted sibling in the training set, and so are
families that were designed together.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from convoy.models.checkout import pip_install
from convoy.models.errors import JobError


@dataclass(frozen=True, slots=True)
class FontFamily:
    """A typeface: `package` is the module with its files in `folder`, named by `pattern` with each of `styles`."""

    name: str
    package: str
    folder: str
    pattern: str
    styles: tuple[str, ...]
    is_test: bool = False

    @property
    def distribution(self) -> str:
        """The name of the package for pip."""
        return self.package.replace("_", "-")


class Face(NamedTuple):
    """One file of a family, such as its bold italic."""

    family: str
    path: Path


_STYLES = ("Regular", "Italic", "Bold", "BoldItalic")
_MATPLOTLIB = "mpl-data/fonts/ttf"


def _matplotlib(name: str, pattern: str, *styles: str) -> FontFamily:
    return FontFamily(name, "matplotlib", _MATPLOTLIB, pattern, styles)


def _packaged(name: str, package: str, pattern: str, *, is_test: bool = False) -> FontFamily:
    return FontFamily(name, package, "files", pattern, _STYLES, is_test)


FAMILIES = (
    _matplotlib("Computer Modern", "cm{}10.ttf", "r", "ti", "b", "ss", "tt"),
    _matplotlib("DejaVu Sans", "DejaVuSans{}.ttf", "", "-Oblique", "-Bold", "-BoldOblique"),
    _matplotlib("DejaVu Sans Mono", "DejaVuSansMono{}.ttf", "", "-Oblique", "-Bold", "-BoldOblique"),
    _matplotlib("DejaVu Serif", "DejaVuSerif{}.ttf", "", "-Italic", "-Bold", "-BoldItalic"),
    _matplotlib("STIX General", "STIXGeneral{}.ttf", "", "Italic", "Bol", "BolIta"),
    _packaged("Barlow", "fontpkg_barlow", "Barlow-{}.ttf"),
    _packaged("Crimson Text", "fontpkg_crimson_text", "CrimsonText-{}.ttf"),
    _packaged("Fira Sans", "fontpkg_fira_sans", "FiraSans-{}.ttf"),
    _packaged("Hanken Grotesk", "font_hanken_grotesk", "HankenGrotesk-{}.otf"),
    _packaged("IBM Plex Mono", "fontpkg_ibm_plex_mono", "IBMPlexMono-{}.ttf"),
    _packaged("IBM Plex Serif", "fontpkg_ibm_plex_serif", "IBMPlexSerif-{}.ttf"),
    _packaged("Lato", "font_lato", "Lato-{}.ttf"),
    FontFamily("Manrope", "font_manrope", "files", "Manrope-{}.ttf", ("Light", "Regular", "Medium", "Bold")),
    FontFamily(
        "Source Sans", "font_source_sans_pro", "files", "SourceSansPro-{}.ttf", ("Regular", "It", "Bold", "BoldIt")
    ),
    FontFamily(
        "Source Serif", "font_source_serif_pro", "files", "SourceSerifPro-{}.ttf", ("Regular", "It", "Bold", "BlackIt")
    ),
    _packaged("Zilla Slab", "fontpkg_zilla_slab", "ZillaSlab-{}.ttf"),
    _packaged("Alegreya Sans", "fontpkg_alegreya_sans", "AlegreyaSans-{}.ttf", is_test=True),
    _packaged("Caladea", "font_caladea", "Caladea-{}.ttf", is_test=True),
    _packaged("Poppins", "fontpkg_poppins", "Poppins-{}.ttf", is_test=True),
    _packaged("PT Sans", "fontpkg_pt_sans", "PT_Sans-Web-{}.ttf", is_test=True),
    _packaged("PT Serif", "fontpkg_pt_serif", "PT_Serif-Web-{}.ttf", is_test=True),
    _packaged("Red Hat Display", "font_rhd", "RedHatDisplay-{}.ttf", is_test=True),
    _packaged("Space Mono", "fontpkg_space_mono", "SpaceMono-{}.ttf", is_test=True),
    _packaged("Spectral", "fontpkg_spectral", "Spectral-{}.ttf", is_test=True),
)


def installed_faces(*, is_test: bool) -> tuple[Face, ...]:
    """The faces for training or for testing. Raises JobError if packages or files are missing."""
    families = [family for family in FAMILIES if family.is_test == is_test]
    missing = {family.distribution for family in families if importlib.util.find_spec(family.package) is None}
    if missing:
        raise JobError(
            f"glyphs are drawn from fonts that are not installed ({', '.join(sorted(missing))}); "
            f"{pip_install('glyphs')}"
        )
    faces = [Face(family.name, path) for family in families for path in _files(family)]
    gone = [face.path.name for face in faces if not face.path.is_file()]
    if gone:
        raise JobError(
            f"this version of the fonts' packages lacks {', '.join(gone)}; {pip_install('glyphs')} --upgrade"
        )
    return tuple(faces)


def _files(family: FontFamily) -> list[Path]:
    # Found without an import: matplotlib takes a second.
    spec = importlib.util.find_spec(family.package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / family.folder
    return [folder / family.pattern.format(style) for style in family.styles]
