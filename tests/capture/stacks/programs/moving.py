"""Two functions that call each other without a pause."""


def even(n):
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def spin():
    while True:
        even(30)


print("there", flush=True)
spin()
