"""representation_learners."""
