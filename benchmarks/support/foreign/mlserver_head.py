"""A custom model of MLServer, in an environment of its own: `mlserver start` of a folder with this file."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from softmax_head import SoftmaxHead


class Head(MLModel):
    async def load(self) -> bool:
        self.head = SoftmaxHead()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        tokens = NumpyCodec.decode_input(payload.inputs[0]).astype("float64")
        outputs = [NumpyCodec.encode_output("answers", self.head(tokens))]
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=outputs)
