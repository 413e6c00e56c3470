"""What goes wrong between trainer and engine, each fault under a name of its own."""

from octavo.errors import BackendError, CheckpointError


class EngineError(BackendError):
    """An engine that cannot be reached, died, refused a request or failed at it."""


class EngineTimeoutError(EngineError):
    """An engine that did not answer in time."""


class EngineAnswerError(EngineError):
    """An answer that is not what the engine's API promises: tokens without logprobs, say."""


class StaleVersionError(EngineError):
    """An engine that answers with other weights than those that were committed last."""


class ProbeError(EngineError):
    """The engine's logprobs are not those of the policy that it was sent.

    Attributes:
        fault: "off-by-one logprobs", "temperature on one side", or "other weights".
    """

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


class WeightAuditError(CheckpointError):
    """Weights that were to be sent, or that an engine holds after an update, are not the trainer's.

    Attributes:
        fault: "missing scale", "transposed scales", "scale 1 by omission", "E8M0 against fp32 scales", "un-updated
            tensor", "quantized router", "corrupted bytes" or "wrong tensor".
        tensor: its name.
    """

    def __init__(self, fault: str, tensor: str, message: str) -> None:
        super().__init__(f"{fault}: {tensor}: {message}")
        self.fault = fault
        self.tensor = tensor
