"""Rollout engines behind a server: octavo's own, vLLM and SGLang."""
