"""How the learning rate goes down."""


def find_rate(lr, step, steps):
    warm = max(1, steps // 20)
    if step < warm:
        return lr * (step + 1) / warm
    return lr * (1.0 - 0.9 * (step - warm) / max(1, steps - warm))
