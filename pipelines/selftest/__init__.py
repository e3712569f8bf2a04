"""The self-test: checks that this card computes right what the pack relies on."""
