"""An environment, a component and a workflow for RL Lab, from a package of their own."""
