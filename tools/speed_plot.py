"""Speeds over lengths as an SVG picture: a panel for each pass, mask and head dim."""


def length(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def mask(causal):
    return "causal" if causal else "full"


def panel(rows, colors, x0, y0, title, top):
    """One set of axes: speeds over lengths."""
    width, height = 250, 150
    lengths = [r["s"] for r in rows]

    def at(i, speed):
        return x0 + 40 + i * (width - 50) / max(1, len(lengths) - 1), y0 + 20 + height * (1 - speed / top)

    out = [f'<text x="{x0 + 40}" y="{y0 + 12}" font-weight="bold">{title}</text>']
    for speed in range(0, top + 1, 200):
        y = at(0, speed)[1]
        out.append(f'<path d="M{x0 + 35:.1f} {y:.1f}H{x0 + width - 5:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 + 30}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>')
    for i, s in enumerate(lengths):
        out.append(f'<text x="{at(i, 0)[0]:.1f}" y="{y0 + height + 34}" text-anchor="middle">{length(s)}</text>')
    for name, color in colors.items():
        key = f"{name}_tflops"
        points = " ".join("{:.1f},{:.1f}".format(*at(i, r[key])) for i, r in enumerate(rows) if key in r)
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return out


def picture(grids, names, colors):
    """`grids`: rows of each pass, by what titles say of it; `names` and `colors` of those that were measured."""
    every = [r for rows in grids.values() for r in rows]
    top = -(-int(max((r[f"{n}_tflops"] for r in every for n in names if f"{n}_tflops" in r), default=1)) // 200) * 200
    dims = sorted({r["d"] for r in every})
    body, y = [], 0
    for which, rows in grids.items():
        for causal in (False, True) if rows else ():
            for column, d in enumerate(dims):
                cells = [r for r in rows if r["d"] == d and r["causal"] == causal]
                body += panel(cells, colors, 260 * column, y, f"d {d}, {mask(causal)}{which}: TFLOP/s by length", top)
            y += 200
    for i, (name, text) in enumerate(names.items()):
        body.append(f'<path d="M{40 + 150 * i} {y + 10}h20" stroke="{colors[name]}" stroke-width="2"/>')
        body.append(f'<text x="{65 + 150 * i}" y="{y + 14}">{text}</text>')
    size = f'width="{260 * len(dims)}" height="{y + 25}"'
    style = 'font-family="sans-serif" font-size="11" fill="#222"'
    lines = "\n".join(body)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect {size} fill="white"/>\n<g {style}>\n'
            f"{lines}\n</g>\n</svg>\n")
