"""``--report DIR``: drift, a conversion or a sweep as one self-contained page of HTML with drawn figures."""
