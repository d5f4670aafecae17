"""Custom models of KServe, in an environment of its own: `python kserve_head.py PORT`."""

import sys

import numpy as np
from kserve import InferOutput, InferResponse, Model, ModelServer
from softmax_head import SoftmaxHead


class Head(Model):
    """The default: metadata that describe no tensor. Asked by either version of the protocol."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.head, self.ready = SoftmaxHead(), True

    def predict(self, payload, *_, **__):
        if isinstance(payload, dict):  # version 1
            return {"predictions": self.head(np.array(payload["instances"], dtype="float64")).tolist()}
        answers = self.head(payload.inputs[0].as_numpy().astype("float64"))
        output = InferOutput("answers", list(answers.shape), "FP64")
        output.set_data_from_numpy(answers, binary_data=False)
        return InferResponse(payload.id, self.name, [output])


class DescribedHead(Head):
    """The same with its tensors described."""

    def get_input_types(self):
        return [{"name": "tokens", "datatype": "FP64", "shape": [-1, -1, self.head.score.shape[0]]}]

    def get_output_types(self):
        return [{"name": "answers", "datatype": "FP64", "shape": [-1]}]


if __name__ == "__main__":
    ModelServer(http_port=int(sys.argv[1]), enable_grpc=False).start([Head("head"), DescribedHead("described")])
