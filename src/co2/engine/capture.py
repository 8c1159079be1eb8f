"""A step of the training as a CUDA graph: recorded once, then replayed without Python and without gaps.

A recorded step reads its inputs from tensors that stay where they are, so each call first copies the batch there. What
changes from step to step beside them (the learning rate, the queue's position) must live on the GPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A step is taken as it is so often before it is recorded: libraries choose their algorithms, kernels are compiled and
# the optimiser's state comes into being in these. They are real steps, and nothing of them is lost.
WARM_UP = 3

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class CapturedStep:
    """Takes steps like the function that it was made of: tensors in, a tensor out.

    Each shape of the inputs is recorded by itself, so that the short last batch of an epoch is replayed as well. All
    recordings share their memory, because only one of them runs at a time.
    """

    def __init__(self, step: Step, tell: Callable[[str], None] = lambda text: None) -> None:
        self._step = step
        self._tell = tell
        self._taken: dict[tuple[torch.Size, ...], int] = {}  # steps of each shape before it was recorded
        self._recorded: dict[tuple[torch.Size, ...], _Recording] = {}
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._possible = True

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._recorded and self._possible and self._taken.get(shapes, 0) >= WARM_UP:
            self._record(shapes, inputs)
        if shapes in self._recorded:
            recording = self._recorded[shapes]
            for place, tensor in zip(recording.inputs, inputs, strict=True):
                place.copy_(tensor, non_blocking=True)
            recording.graph.replay()
            return recording.output.clone()  # the next replay writes over it
        self._taken[shapes] = self._taken.get(shapes, 0) + 1
        return self._on_the_side(inputs)

    def _on_the_side(self, inputs: Sequence[Tensor]) -> Tensor:
        """A step as it is, on the stream on which it will be recorded: autograd remembers streams."""
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            output = self._step(*inputs)
        main.wait_stream(self._stream)
        for tensor in inputs:
            tensor.record_stream(self._stream)
        output.record_stream(main)
        return output

    def _record(self, shapes: tuple[torch.Size, ...], inputs: Sequence[Tensor]) -> None:
        """Records the step without taking it."""
        places = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which decode images say, may go on using the GPU in the meantime.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = self._step(*places)
        except RuntimeError as error:
            self._possible = False
            reason = str(error).strip().splitlines()[0]
            self._tell(f"The step cannot be captured in a CUDA graph and runs as it is, more slowly ({reason}).")
            return
        self._recorded[shapes] = _Recording(graph, places, output)
