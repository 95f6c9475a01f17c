"""What decides of numbers besides code and data: processor, libraries, switches.

Only what is imported already is asked: nothing here loads a library, and none of it may fail.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

NUMERIC_PACKAGES = frozenset(
    """
    torch torchvision torchaudio numpy scipy jax jaxlib tensorflow keras cupy numba triton pandas
    polars scikit-learn xgboost lightgbm transformers accelerate deepspeed flash-attn xformers
    bitsandbytes lightning pytorch-lightning timm diffusers peft trl einops mkl tbb intel-openmp
    apex transformer-engine torch-geometric optax flax equinox onnxruntime
    """.split()
)
"""Distributions whose version may change what is computed; those of NVIDIA count too."""

_MOST_TEXT = 200


def describe_machine() -> dict[str, Any]:
    """Processor, C library, BLAS and CUDA, as far as they are known to who is imported."""
    return _drop_unknown(
        {
            "cpu": _drop_unknown({"model": _ask(_find_cpu), **_find_torch_cpu()}),
            "libc": _ask(_find_libc),
            "blas": _drop_unknown({"numpy": _ask(_find_numpy_blas), "pools": _ask(_find_pools)}),
            "cuda": _drop_unknown(_find_cuda()),
        }
    )


def describe_switches() -> dict[str, Any]:
    """Switches of torch, jax and accelerate as they are now; the newest ones count."""
    return _drop_unknown(
        {
            "torch": _drop_unknown(_read_torch()),
            "jax": _drop_unknown(_read_jax()),
            "accumulation": _ask(_find_accumulation),
            "distributed": _drop_unknown(_read_distributed()),
        }
    )


def _ask(question: Callable[[], Any]) -> Any:
    """An answer, or None: what is asked may be of any version, or half imported."""
    try:
        value = question()
    except Exception:  # noqa: BLE001 - a library that cannot say is no trouble of the training
        return None
    return value[:_MOST_TEXT] if isinstance(value, str) else value


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {}, "", ())}


def _find_cpu() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model", "cpu model"):
                    return value.strip()
    return platform.processor()


def _find_libc() -> str | None:
    if sys.platform == "win32":
        return None
    names = getattr(os, "confstr_names", {})
    return os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in names else None


def _find_numpy_blas() -> str | None:
    config: Any = sys.modules.get("numpy.__config__")
    blas = config.CONFIG["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _find_pools() -> list[str]:
    """What threadpoolctl sees: each library, its version and its threads."""
    control: Any = sys.modules.get("threadpoolctl")
    pools = control.threadpool_info()
    return sorted(
        f"{pool.get('internal_api')} {pool.get('version') or ''} {pool.get('num_threads')}"
        for pool in pools
    )


def _find_torch_cpu() -> dict[str, Any]:
    torch = _find_torch()
    return {} if torch is None else {"torch": _ask(torch.backends.cpu.get_cpu_capability)}


def _find_torch() -> Any | None:
    """Torch where it is imported, and whole; on another thread it may be halfway."""
    torch: Any = sys.modules.get("torch")
    is_whole = torch is not None and all(
        hasattr(torch, name) for name in ("backends", "version", "get_num_threads", "compile")
    )
    return torch if is_whole else None


def _find_cuda() -> dict[str, Any]:
    torch = _find_torch()
    if torch is None or torch.version.cuda is None:
        hip = None if torch is None else getattr(torch.version, "hip", None)
        return {"hip": hip}
    return {
        "torch": torch.version.cuda,
        "cudnn": _ask(torch.backends.cudnn.version),
        "nccl": _ask(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    }


def _read_torch() -> dict[str, Any]:
    torch = _find_torch()
    if torch is None:
        return {}
    backends = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    return {
        "num_threads": _ask(torch.get_num_threads),
        "num_interop_threads": _ask(torch.get_num_interop_threads),
        "default_dtype": _ask(lambda: str(torch.get_default_dtype())),
        "float32_matmul_precision": _ask(torch.get_float32_matmul_precision),
        "deterministic_algorithms": _ask(torch.are_deterministic_algorithms_enabled),
        "cudnn_enabled": _ask(lambda: bool(cudnn.enabled)),
        "cudnn_benchmark": _ask(lambda: bool(cudnn.benchmark)),
        "cudnn_deterministic": _ask(lambda: bool(cudnn.deterministic)),
        "cudnn_allow_tf32": _ask(lambda: bool(cudnn.allow_tf32)),
        "matmul_allow_tf32": _ask(lambda: bool(matmul.allow_tf32)),
        "matmul_fp32_precision": _ask(lambda: str(matmul.fp32_precision)),
        "reduced_fp16_sums": _ask(lambda: bool(matmul.allow_fp16_reduced_precision_reduction)),
        "reduced_bf16_sums": _ask(lambda: bool(matmul.allow_bf16_reduced_precision_reduction)),
        "flash_attention": _ask(backends.cuda.flash_sdp_enabled),
        "mkldnn": _ask(lambda: bool(backends.mkldnn.enabled)),
        "anomaly_detection": _ask(torch.is_anomaly_enabled),
        # Compiled functions bring it in; whether one is used cannot be seen.
        "compile_loaded": "torch._dynamo.convert_frame" in sys.modules,
    }


def _read_jax() -> dict[str, Any]:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return {}
    return {
        "enable_x64": _ask(lambda: bool(jax.config.jax_enable_x64)),
        "default_matmul_precision": _ask(lambda: jax.config.jax_default_matmul_precision),
    }


def _find_accumulation() -> int | None:
    state: Any = sys.modules.get("accelerate.state")
    return int(state.GradientState._shared_state["plugin_kwargs"]["num_steps"])


def _read_distributed() -> dict[str, Any]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not _ask(distributed.is_available):
        return {}
    if not _ask(distributed.is_initialized):
        return {}
    return {
        "backend": _ask(distributed.get_backend),
        "world_size": _ask(distributed.get_world_size),
    }
