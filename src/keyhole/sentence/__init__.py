"""What recovered heads attend to in a sentence, beside the model they were recovered from."""

from keyhole.sentence.attention_on import attention_on

__all__ = ["attention_on"]
