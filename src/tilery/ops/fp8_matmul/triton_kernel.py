from tilery.parts.triton_fp8_products import Config, archs, compile, configs, default, estimate, refusal, run, workspace

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]
