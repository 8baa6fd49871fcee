"""Tries an installed wheel where there is nothing but NumPy: it is whole, and its engine computes.

Run it with the wheel on the path, not the sources: `make wheel` does.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import embedfuse
from embedfuse import cpu
from embedfuse.plan import PlannedFeature, plan_group


def main() -> None:
    package = Path(embedfuse.__file__).parent
    sources = Path(__file__).parent.parent / "src" / "embedfuse"
    assert package != sources, f"these are the sources: {package}"
    shipped = {path.relative_to(sources) for end in ("py", "pyi", "cu", "typed") for path in sources.rglob(f"*.{end}")}
    shipped.add(Path("py.typed"))
    missing = [str(path) for path in sorted(shipped) if not (package / path).is_file()]
    assert not missing, f"the wheel lacks {', '.join(missing)}"
    assert find_spec("embedfuse.kernels._launch"), "the wheel lacks what launches GPU kernels"
    for framework in ("torch", "jax", "keras", "tensorflow"):
        assert framework not in sys.modules, f"`import embedfuse` loaded {framework}"

    group = plan_group([(3, 2)], [PlannedFeature(0, "mean")])
    table = np.zeros(group.size, np.float32)
    table[:6] = np.arange(6)
    bags = SimpleNamespace(ids=np.array([0, 2, 1]), offsets=np.array([0, 2, 2, 3]), weights=None, bags=3)
    out, scale = np.empty((3, 2), np.float32), np.empty(3, np.float32)
    bad = cpu.pooled_lookup(table, group.features, bags, out, scale, checked=True, threads=2)
    assert bad is None
    assert out.tolist() == [[2, 3], [0, 0], [2, 3]], out

    others = "beside PyTorch" if find_spec("torch") else "without PyTorch"
    print(f"embedfuse {embedfuse.__version__} {others}: {', '.join(cpu.isas())}; threads: {cpu.has_threads}")


if __name__ == "__main__":
    main()
