"""The sizes of an attention module, validated."""


def head_sizes(
    dim: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None, v_head_dim: int | None, **widths: int
) -> tuple[int, int, int, int]:
    """The sizes with their defaults filled in; see `tril.model.attention.MultiHeadAttention`.

    Args:
        widths: further sizes that must be at least 1.

    Returns:
        n_heads, n_kv_heads, head_dim and v_head_dim.

    Raises:
        ValueError: sizes below 1, or that do not divide.
    """
    sizes = {"dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    for name, size in (sizes | widths).items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if head_dim is None and dim % n_heads:
        raise ValueError(f"n_heads={n_heads} must divide dim={dim}; change one of them or set head_dim")
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_heads={n_heads}")
    head_dim = dim // n_heads if head_dim is None else head_dim
    return n_heads, n_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim
