import torch, flexgen, json, time, statistics
from benchmarks.cases import documents, causal
from benchmarks.block_table import same_document
from benchmarks.timing import interleaved
from torch.nn.attention.flex_attention import create_block_mask, flex_attention as tf
def inputs(L,D,H,B): return [torch.randn(B,H,L,D,device='cuda',dtype=torch.bfloat16) for _ in range(3)]
for D in (64,128):
    L=8192;H=2048//D
    q,k,v=inputs(L,D,H,2)
    for nm,doc in (('equal',torch.arange(L,device='cuda')//512),('random',torch.sort(torch.randint(0,16,(L,),device='cuda',generator=torch.Generator('cuda').manual_seed(0))).values+0)):
        if nm=='random':
            cuts=torch.sort(torch.randperm(L-1,device='cuda',generator=torch.Generator('cuda').manual_seed(1))[:15]+1).values
            doc=torch.searchsorted(cuts,torch.arange(L,device='cuda'),right=True)
        doc=doc.to(torch.int32)
        m=documents(doc)
        calls={}
        a=flexgen.compile(None,m); calls['implicit']=lambda a=a:a(q,k,v)
        for bn in (32,64,128):
            o={'BLOCK_N':bn}
            try:
                x=flexgen.compile(None,m,o); x(q,k,v); calls[f'bn{bn}']=lambda x=x:x(q,k,v)
            except Exception as e: print(bn,str(e)[:200])
        # table of 128x128 blocks walked by default tiles
        from flexgen.problem import TableForm
        import flexgen.lowering.triton.choose_table as ct
        for kvb in (32,64,128,256):
            b=flexgen.compile(None,m)
            old=ct.preferred
            import flexgen.tables as tt
            oldf=tt.table_form
            tt.table_form=lambda p,t,o,kvb=kvb: TableForm(128,kvb,True,derived=True)
            tb=b.block_table(q,k); tt.table_form=oldf
            calls[f'table{kvb} n={int(tb.needed)}']=lambda b=b,tb=tb:b(q,k,v,block_table=tb)
        c=flexgen.compile(None,causal); calls['causal only']=lambda: c(q,k,v)
        bm=create_block_mask(m,None,None,L,L,'cuda'); cf=torch.compile(tf,dynamic=False)
        calls['flex']=lambda: cf(q,k,v,block_mask=bm)
        ref=calls['flex']()
        for n,f in calls.items():
            if n!='causal only': assert (f()-ref).abs().max()<2e-2,(n,(f()-ref).abs().max())
        t=interleaved(calls,5)
        print(D,nm,a.lower(q,k,v).plan.BLOCK_M,a.lower(q,k,v).plan.BLOCK_N,{n:round(x,3) for n,x in t.items()},flush=True)
