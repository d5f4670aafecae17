"""A learner per score form."""
