"""Whether ``import join`` finds this library's package: :func:`found_instead`."""

from importlib.util import find_spec
from pathlib import Path


def found_instead() -> Path | None:
    """The file or folder that ``import join`` finds in place of the package beside this one; it is not run."""
    spec = find_spec("join")
    if spec is None:
        return None
    found = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
    return None if found == Path(__file__).parents[1] / "join" else found
