-- sampler: create a sampler, or return the existing one. Its weights must exist.
-- needs: samplers
local args = cjson.decode(ARGV[1])
local sampler, session = 'cotrain:sampler:' .. args.sampler, 'cotrain:session:' .. args.session

local known = redis.call('GET', sampler)
if known then
  return known
end
if redis.call('HEXISTS', session, 'finished_at') == 1 then
  return 'FINISHED'
end
if args.weights ~= '' and redis.call('EXISTS', 'cotrain:weights:' .. args.weights) == 0 then
  return 'GONE'
end
if count_samplers(args.tenant) >= args.max_samplers then
  return 'SAMPLERS'
end
redis.call('SET', sampler, args.record)
end_after(sampler, args.idle_ms)
list_sampler(args.tenant, args.sampler, args.idle_ms)
redis.call('SADD', 'cotrain:session:' .. args.session .. ':samplers', args.sampler)
if args.weights ~= '' then
  redis.call('SADD', 'cotrain:weights:' .. args.weights .. ':users', 's:' .. args.sampler)
end
return args.record
