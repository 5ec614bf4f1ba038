"""The observer against the truth: the same random program runs on real tensors whose elements carry their own number.

A number that ends up in the parameter was loaded from the tensor that owns it, so coverage on both sides can be counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from ckaudit.engines.vllm import apart  # noqa: E402
from ckaudit.engines.vllm.provenance import Provenance  # noqa: E402

Tensors = list["torch.Tensor"]
SEEDS = 150
SHAPES = [(4, 6), (24,), (2, 12), (3, 8), (2, 3, 4)]


def _view(rng: random.Random, t: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A random chain of views, as a function, so that both worlds take the same one."""
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice(["narrow", "narrow", "transpose", "view", "select", "chunk", "step", "unsqueeze"])
        dims = t.dim()
        if kind == "narrow" and dims:
            d = rng.randrange(dims)
            start = rng.randrange(t.shape[d])
            length = rng.randint(1, t.shape[d] - start)
            step = lambda x, d=d, s=start, n=length: x.narrow(d, s, n)  # noqa: E731
        elif kind == "transpose" and dims >= 2:
            a, b = rng.sample(range(dims), 2)
            step = lambda x, a=a, b=b: x.transpose(a, b)  # noqa: E731
        elif kind == "view" and t.is_contiguous() and t.numel() % 2 == 0:
            step = lambda x: x.view(2, -1)  # noqa: E731
        elif kind == "select" and dims >= 2:
            d = rng.randrange(dims)
            i = rng.randrange(t.shape[d])
            step = lambda x, d=d, i=i: x.select(d, i)  # noqa: E731
        elif kind == "chunk" and dims:
            d, pick = rng.randrange(dims), rng.randrange(2)
            step = lambda x, d=d, p=pick: x.chunk(2, d)[p % len(x.chunk(2, d))]  # noqa: E731
        elif kind == "step" and dims and t.shape[0] > 2:
            step = lambda x: x[::2]  # noqa: E731
        else:
            step = lambda x: x.unsqueeze(0)  # noqa: E731
        steps.append(step)
        t = step(t)
    return lambda x: _all(steps, x)


def _all(steps: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for step in steps:
        x = step(x)
    return x


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _fresh(rng: random.Random, pool: Tensors) -> Callable[[Tensors], torch.Tensor]:
    """A random operation that makes a new tensor of one or two of the pool."""
    i = rng.randrange(len(pool))
    view = _view(rng, pool[i])
    t = view(pool[i])
    kind = rng.choice(
        ["clone", "reshape", "cat", "stack", "pad", "repeat", "scratch", "zeros", "index", "permute", "expand"]
    )
    if kind == "cat" and t.dim():
        d = rng.randrange(t.dim())
        return lambda p: torch.cat([view(p[i]), view(p[i]).narrow(d, 0, 1)], d)
    if kind == "stack":
        return lambda p: torch.stack([view(p[i]), view(p[i])], rng.choice([0]))
    if kind == "pad" and t.dim():
        left, right = rng.randint(0, 2), rng.randint(0, 2)
        return lambda p: torch.nn.functional.pad(view(p[i]), (left, right))
    if kind == "repeat":
        times = [rng.randint(1, 2) for _ in range(max(t.dim(), 1))]
        return lambda p: view(p[i]).repeat(*times)
    if kind == "scratch":
        return lambda p: torch.zeros(SHAPES[0], dtype=torch.int64, device=p[0].device)
    if kind == "zeros":
        return lambda p: torch.zeros_like(view(p[i]))
    if kind == "index" and t.dim():
        picked = [rng.randrange(t.shape[0]) for _ in range(rng.randint(1, 4))]
        return lambda p: view(p[i])[torch.tensor(picked)]
    if kind == "permute" and t.dim() >= 2:
        return lambda p: view(p[i]).transpose(0, -1).contiguous()
    if kind == "expand":
        return lambda p: view(p[i]).unsqueeze(0).expand(2, *t.shape).reshape(-1)
    if kind == "reshape":
        return lambda p: view(p[i]).reshape(-1)
    return lambda p: view(p[i]).clone()


def _write(rng: random.Random, pool: Tensors, targets: range) -> Callable[[Tensors], None]:
    """A random write of a part of one tensor of the pool into a part of another, or of a constant."""
    j = rng.choice(targets) if rng.random() < 0.7 else rng.randrange(len(pool))
    view = _view(rng, pool[j])
    target = view(pool[j])
    if rng.random() < 0.12:
        return lambda p: view(p[j]).zero_()
    if rng.random() < 0.1 and target.dim():
        rows = sorted(rng.sample(range(target.shape[0]), rng.randint(1, target.shape[0])))
        sources = [k for k in range(len(pool)) if pool[k].numel() >= target.numel() and not _same(pool[k], pool[j])]
        if sources:
            k = rng.choice(sources)
            shape = (len(rows), *target.shape[1:])
            count = target[rows].numel()

            def put(p: Tensors) -> None:
                view(p[j])[torch.tensor(rows)] = p[k].reshape(-1)[:count].reshape(shape)

            return put
    for _ in range(30):
        k = rng.randrange(len(pool))
        take = _view(rng, pool[k])
        source = take(pool[k])
        if _same(pool[k], pool[j]):
            continue  # what a copy between overlapping views does is undefined
        if source.numel() == target.numel():
            return lambda p: view(p[j]).copy_(take(p[k]).reshape(target.shape))
        if source.numel() > target.numel():
            return lambda p: view(p[j]).copy_(take(p[k]).reshape(-1)[: target.numel()].reshape(target.shape))
        if source.numel() == 1:
            return lambda p: view(p[j]).copy_(take(p[k]).reshape(()))
    return lambda p: None


def _program(seed: int) -> tuple[list[Callable[[Tensors], None]], int, int]:
    rng = random.Random(seed)
    roots, params = rng.randint(1, 3), rng.randint(1, 2)
    pool = _tagged(seed, roots, params)
    program: list[Callable[[Tensors], None]] = []
    for _ in range(rng.randint(1, 10)):
        if rng.random() < 0.4:
            make = _fresh(rng, pool)
            step = lambda p, make=make: p.append(make(p))  # noqa: E731
        else:
            step = _write(rng, pool, range(roots, roots + params))
        try:
            step(pool)
        except (RuntimeError, UserWarning):
            continue  # torch refuses to copy between overlapping views
        program.append(step)
    return program, roots, params


def _tagged(seed: int, roots: int, params: int) -> Tensors:
    """Checkpoint tensors whose elements are numbered from 1, then parameters full of -1."""
    rng = random.Random(seed + 1)
    pool, start = [], 1
    for _ in range(roots):
        shape = rng.choice(SHAPES)
        count = torch.Size(shape).numel()
        pool.append(torch.arange(start, start + count).reshape(shape))
        start += count
    return pool + [torch.full(rng.choice(SHAPES), -1) for _ in range(params)]


@pytest.mark.parametrize("block", range(8))
def test_coverage_equals_what_numbered_elements_show(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if block % 2:  # every pair goes the way that crowds go
        monkeypatch.setattr(apart, "_FEW", 1)
    for seed in range(block * SEEDS, block * SEEDS + SEEDS):
        program, roots, params = _program(seed)
        real = _tagged(seed, roots, params)
        fresh = _tagged(seed, roots, params)
        meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in fresh]
        seen = Provenance()
        for i in range(roots):
            seen.yielded(f"t{i}", meta[i])
        for i in range(roots, roots + params):
            seen.watch(f"p{i}", meta[i])
        for step in program:
            step(real)
        with seen:
            for step in program:
                step(meta)
        result = seen.result([(f"p{i}", meta[i]) for i in range(roots, roots + params)])
        held = torch.cat([real[i].flatten() for i in range(roots, roots + params)]).unique().tolist()
        for i in range(roots, roots + params):
            coverage = result.parameters[f"p{i}"]
            assert coverage.unknown == 0, seed
            assert coverage.loaded == int((real[i] > 0).sum()), (seed, i)
            assert coverage.constant == int((real[i] == 0).sum()), (seed, i)
        for i in range(roots):
            numbers = set(fresh[i].flatten().tolist())
            assert result.tensors[f"t{i}"].read == len(numbers & set(held)), (seed, i)
