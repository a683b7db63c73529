"""The loop and what it stands on: phases, cadences, collection, capture, evaluation."""
