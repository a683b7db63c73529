"""`rl-lab export` and `rl-lab push`: a trained agent as a folder to take away, as an ONNX model, and on a hub."""
