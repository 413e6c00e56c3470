"""Serving: LLM generates from a model or a checkpoint over a paged KV cache; engine/ holds the machinery."""

from octavo.serve.llm import LLM
from octavo.serve.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from octavo.serve.sampling_params import ParameterError, SamplingParams
from octavo.weights.manifest import tensor_sha256
from octavo.weights.update import WeightUpdate

__all__ = [
    "LLM",
    "CompletionOutput",
    "FlatLogprobs",
    "Logprob",
    "ParameterError",
    "RequestOutput",
    "SamplingParams",
    "WeightUpdate",
    "tensor_sha256",
]
