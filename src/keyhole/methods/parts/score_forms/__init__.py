"""A learner per score form that is not bilinear, and one for masses that are powers of bilinear logits."""
