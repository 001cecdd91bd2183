print("serving on one card")
