import time, sys, rlx
from rlx.backends.cuda import driver
from rlx.backends.cuda.backend import BACKEND
kind=sys.argv[1]
body={"hang":"$L: bra $L;","trap":"trap;","fault":"mov.u64 %r1, 16; st.global.u32 [%r1], %r2;"}[kind]
ptx=f""".version 7.8
.target sm_90
.address_size 64
.visible .entry bad() {{ .reg .u64 %r1; .reg .u32 %r2; {body} ret; }}"""
driver.WAIT_SECONDS=3; import faulthandler; faulthandler.dump_traceback_later(13)
r=rlx.auto_runner(device="cuda"); print(r.generate([5,6,7], 4))
c=BACKEND.card(); m=c.module(driver.link(ptx)); f=c.function(m,"bad",0)
given,mem=driver.pointers([1])
t=time.time(); c.launch(f, driver.config(1,32,0,c), given)
try: print(r.generate([5,6,7], 4))
except Exception as e: print(f"{time.time()-t:.2f} s", type(e).__name__, e)
t=time.time()
try: print(r.generate([5,6,7], 4))
except Exception as e: print(f"{time.time()-t:.2f} s again", type(e).__name__, e)
t=time.time(); r.close(); print(f"close {time.time()-t:.2f} s")
if kind!="hang":
    try:
        n=rlx.auto_runner(device="cuda"); print("new runner:", n.generate([5,6,7], 4))
    except Exception as e: print("new runner", type(e).__name__, e)
t=time.time()
