"""Operations and bytes of training the paper's decoder-only transformers (section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of an example: the paper does not say; this is what such models were trained on in its time.
SEQUENCE = 1024
# A backward pass computes the forward one again, as GPipe does, and then twice as much.
BACKWARD = 3.0

ACTIVATION_BYTES = 2  # of a number: bfloat16
GRADIENT_BYTES = 4  # float32
WEIGHT_BYTES = 12  # float32, with Adam's two moments


@dataclass(frozen=True)
class Decoder:
    """Layers of attention and a feed-forward; the embedding and the softmax count as one layer each."""

    layers: int
    d_model: int
    d_ff: int

    @property
    def layer_parameters(self) -> int:
        return 4 * self.d_model * self.d_model + 2 * self.d_model * self.d_ff

    @property
    def parts(self) -> int:
        """Return the number of layers, and of other parts that count as one, which are divided between stages."""
        return self.layers + 2

    def forward_flops(self, parts: float, tokens: float) -> float:
        """Of so many parts: two operations for each parameter and token, and each token's scores with its sequence."""
        scores = 4 * SEQUENCE * self.d_model
        return parts * tokens * (2 * self.layer_parameters + scores)


# 3 billion parameters: the paper's table 2 and figure 10.
DECODER_3B = Decoder(layers=62, d_model=2048, d_ff=8192)
