"""The Neuron platform: KV in the HBM of Trainium, under vllm-neuron, TorchNeuron or NxD Inference."""

from kvxfer_neuron.platform import NeuronPlatform

__all__ = ["NeuronPlatform"]
