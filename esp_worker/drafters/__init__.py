"""Drafters: where draft tokens come from. One file a method behind the protocol in `base`."""
