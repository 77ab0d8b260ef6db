from tilery.parts.numba_fp8_products import Config, archs, compile, configs, default, refusal, run, workspace

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]
